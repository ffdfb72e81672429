"""Inputs of the checker: facts of the live machine, of a capture, or of a pasted text."""
