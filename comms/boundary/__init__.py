"""Checked input and output: messages of other processes are parsed as data, and files are replaced atomically."""
