"""Codecs, one a file: the format of a payload, what it is in torch, and the compressors that send it."""
