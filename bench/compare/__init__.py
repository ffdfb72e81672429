"""`gradwire compare`: plans, compressors and peers side by side, on real models or replayed ones."""
