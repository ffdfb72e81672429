"""Training goes on where a rank or a node is lost, and takes in new ones, without a restart."""
