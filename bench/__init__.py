"""Measurements: the bench, the emulated cluster, real training runs."""
