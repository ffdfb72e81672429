"""`gradwire doctor`: from "two nodes are slower than one" to the cause."""
