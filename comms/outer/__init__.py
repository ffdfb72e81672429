"""Trains workers that exchange parameters every few steps, instead of gradients at every step."""
