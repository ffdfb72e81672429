"""What is run on a machine with a GPU (docs/reference/gpu.md), and what is predicted for clusters of them
(docs/reference/gpu_plans.md)."""
