"""Sharded training: the collectives of FSDP2."""
