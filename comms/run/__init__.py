"""Runs plans: all-reduces, the programs that issue their collectives, and the executors that run those."""
