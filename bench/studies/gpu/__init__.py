"""Clusters of GPUs, measured and predicted; feeds docs/results/gpu.md and docs/results/gpu_plans.md."""
