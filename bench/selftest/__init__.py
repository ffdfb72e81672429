"""`gradwire selftest`: what gradwire does on this machine's GPUs, tried once, and one JSON of how it went."""
