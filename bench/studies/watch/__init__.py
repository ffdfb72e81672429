"""Injected delays and disagreements in jobs of several kinds: what a watch says of them.

Feeds docs/results/diagnosis.md.
"""
