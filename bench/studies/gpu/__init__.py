"""What is run on a machine with a GPU, and what is predicted for clusters of them."""
