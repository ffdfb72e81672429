"""Types of the compiled module `gradwire._native` (csrc/cpu)."""
