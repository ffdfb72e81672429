"""The collectives a phase needs, one file a transport."""
