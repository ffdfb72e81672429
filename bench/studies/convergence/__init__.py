"""Does training under a compressor reach plain DDP's quality, and how soon? Feeds docs/reference/convergence.md."""
