"""Gradient compression: codecs, the exchanges around them, their kernels, and optimizers that communicate."""
