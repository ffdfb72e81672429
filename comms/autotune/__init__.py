"""Decisions from measurements of running training: cuts between all-reduces, and advice on plan and compressor."""
