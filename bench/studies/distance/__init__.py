"""Studies of round trips and packet loss between nodes, for docs/results/distance.md."""
