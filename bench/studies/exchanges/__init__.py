"""Studies of the cost of other exchanges between nodes, for docs/results/exchanges.md."""
