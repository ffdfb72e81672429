"""Averages gradients over all ranks: plans, transports, the DDP hook, FSDP2, the process group backend, elasticity."""
