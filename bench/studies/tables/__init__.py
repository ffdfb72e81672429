"""The tables of all pages of docs/results, as performance.md and distance.md, from docs/results/data.

Markdown for people, CSV for everything else.
"""
