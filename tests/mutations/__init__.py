"""Faults that were planted in the CUDA path, as data, and a command that plants them again: run.py."""
