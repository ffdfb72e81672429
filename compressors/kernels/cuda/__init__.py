"""The kernels on CUDA, compiled by CuPy at run time."""
