"""Backends that run the collectives which `gradwire bench` times: one file for each library."""
