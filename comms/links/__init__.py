"""This package estimates and measures the links between ranks; see estimates.py."""
