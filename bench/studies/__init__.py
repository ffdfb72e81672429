"""What measures a page of docs/: run from a checkout, not in the wheel. Each module says which page it feeds."""
