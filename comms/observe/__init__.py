"""What a running job says about itself: who is late, what hangs, a timeline, metrics."""
