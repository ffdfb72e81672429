"""What distance does to a job: round trips and loss between nodes; docs/results/distance.md."""
