"""`gradwire emulate`: a cluster of network namespaces on one machine, and the ranks of a job on it."""
