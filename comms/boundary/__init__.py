"""Where bytes of other processes come in and where state leaves for a file: both are data, checked, never code."""
