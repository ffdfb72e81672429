"""`gradwire selftest`: everything that gradwire does on this machine's GPUs, tried once, and one JSON of how it went."""
