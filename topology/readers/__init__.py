"""From what a machine says about itself to a Machine: one reader for each format."""
