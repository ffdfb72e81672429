"""Watches the collectives of every process group of torch: who is late, what hangs, which ranks disagree."""
