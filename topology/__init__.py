"""Models of a job's machines: their processors, GPUs, NICs and links, read from the system. Needs no torch."""
