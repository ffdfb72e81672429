"""A fake CuPy above the fake GPUs: gradwire's own launches, whose kernels run on the CPU and are watched."""
