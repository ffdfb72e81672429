"""Optimizers that communicate, and which optimizer fits which compressor."""
