"""Commands that are not measurements: parse, call, print."""
