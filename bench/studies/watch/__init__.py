"""Planted delays and disagreements in jobs of several kinds: what a watch says of them.

Feeds docs/how-to/watch_any_job.md.
"""
