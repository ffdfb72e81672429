"""What runs the collectives that `gradwire bench` times: one file for each library."""
