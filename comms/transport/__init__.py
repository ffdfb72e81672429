"""This package has the transports: collectives of CPU and CUDA tensors over a fixed set of ranks; see groups.py."""
