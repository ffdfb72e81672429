"""Readers that make a `Machine` of what a system reports about itself, one for each format."""
