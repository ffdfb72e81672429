"""Clusters of GPUs, measured and predicted; feeds docs/reference/gpu.md and docs/results/gpu_plans.md."""
