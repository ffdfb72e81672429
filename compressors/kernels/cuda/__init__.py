"""The kernels on CUDA: each function is the twin of the one in compressors/kernels/reference/.

Payloads are the same bits as on the CPU. Every function checks its tensors first (ValueError), and returns as soon as
its kernels are on torch's current stream. CuPy is imported with the first launch, where CudaKernelsError says what is
missing.
"""

from gradwire.compressors.kernels.cuda.blocks import decode_pieces, decode_reduce, encode_pieces, reduce_encode
from gradwire.compressors.kernels.cuda.dgc import dgc_step, dgc_step_many, dgc_sum, scatter_add
from gradwire.compressors.kernels.cuda.powersgd import (
    orthogonalize_many,
    powersgd_back_project_many,
    powersgd_project_many,
    powersgd_restore,
    powersgd_restore_many,
)
from gradwire.compressors.kernels.reference import powersgd_back_project, powersgd_project

__all__ = [
    "decode_pieces",
    "decode_reduce",
    "dgc_step",
    "dgc_step_many",
    "dgc_sum",
    "encode_pieces",
    "orthogonalize_many",
    "powersgd_back_project",
    "powersgd_back_project_many",
    "powersgd_project",
    "powersgd_project_many",
    "powersgd_restore",
    "powersgd_restore_many",
    "reduce_encode",
    "scatter_add",
]
