"""What the machines of a job consist of, and how fast their links are. Needs no torch."""
