"""`gradwire bench kernels`: the compressors' kernels against memory and against torch."""
