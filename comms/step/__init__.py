"""Follows training steps: when one begins and ends, and which features take part in it."""
