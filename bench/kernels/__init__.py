"""`gradwire bench kernels` compares the speed of the compressors' kernels with that of a copy and of torch."""
