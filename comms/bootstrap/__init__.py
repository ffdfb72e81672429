"""Connects the ranks of a job and detects their failures: stores, placement, launchers, probes, torch's internals."""
