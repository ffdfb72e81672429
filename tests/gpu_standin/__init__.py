"""Torch's own CUDA build over CUDA and NCCL in host memory: docs/develop/test_on_a_gpu_of_host_memory.md."""
