"""This package estimates and measures the rates and latencies of the links between ranks; see estimates.py."""
