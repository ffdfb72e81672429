"""Gradients on the wire, and as little else as possible."""

__version__ = "0.1.0"
