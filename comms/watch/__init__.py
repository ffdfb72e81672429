"""Watches the collectives of all of torch's process groups, and names late ranks, stalls and disagreements."""
