"""Observation of a running job: stragglers, stalls, traces and metrics."""
