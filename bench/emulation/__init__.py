"""`gradwire emulate` runs the ranks of a job on a cluster of network namespaces on one machine."""
