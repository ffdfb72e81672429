"""How a bucket of gradients is averaged over all ranks: plans, transports, the DDP hook, the backend."""
