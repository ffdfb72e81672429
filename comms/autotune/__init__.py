"""What is measured while training runs, and what is changed for it."""
