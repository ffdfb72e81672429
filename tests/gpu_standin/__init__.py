"""Torch's own CUDA build over a CUDA runtime and an NCCL in host memory; docs/how-to/test_on_a_gpu_of_host_memory.md."""
