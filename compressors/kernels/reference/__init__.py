"""Every kernel in a few lines of torch: oracle, fall-back, documentation."""
