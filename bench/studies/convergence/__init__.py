"""Does training under a compressor reach plain DDP's quality, and how soon? Feeds docs/results/convergence.md."""
