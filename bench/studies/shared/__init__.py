"""Parts that studies share: command lines, configurations in turns on emulated clusters, the store of a study's ranks.

Feeds docs/results/performance.md, docs/results/elastic.md and others, by the studies that use it.
"""
