"""The compressors' inner loops: native, CUDA, and their reference in torch."""
