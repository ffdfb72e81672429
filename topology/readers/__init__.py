"""What a machine says about itself becomes a Machine: one reader for each format."""
