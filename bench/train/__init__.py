"""`make run`: one training under plain DDP, gradwire and gradwire with a compressor."""
