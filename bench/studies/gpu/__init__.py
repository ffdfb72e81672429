"""Clusters of GPUs, measured and predicted; feeds docs/reference/gpu.md and docs/reference/gpu_plans.md."""
