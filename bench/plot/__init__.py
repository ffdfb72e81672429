"""`gradwire plot`: pictures of what the other benches wrote."""
