"""Training scripts that this project did not write, run as they are: see __main__.py."""
