"""Matrices in the bases in which their gradients are uncorrelated: `rotated4` and `rotated2`."""
