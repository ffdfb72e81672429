"""The kernels on CUDA: each function is the twin of the one in compressors/kernels/reference/.

Payloads are the same bits as on the CPU. Every function checks its tensors first (ValueError), and returns as soon as
its kernels are on torch's current stream. CuPy is imported with the first launch, where CudaKernelsError says what is
missing.
"""

from gradwire.compressors.kernels.cuda.cast import cast_decode_reduce, cast_encode, cast_reduce_encode
from gradwire.compressors.kernels.cuda.chunk_topk import (
    chunk_topk_decode_pieces,
    chunk_topk_decode_reduce,
    chunk_topk_encode,
    chunk_topk_encode_pieces,
    chunk_topk_reduce_encode,
)
from gradwire.compressors.kernels.cuda.dgc import dgc_step, dgc_step_many, dgc_sum, scatter_add
from gradwire.compressors.kernels.cuda.onebit import (
    onebit_decode_pieces,
    onebit_decode_reduce,
    onebit_encode,
    onebit_encode_pieces,
    onebit_reduce_encode,
)
from gradwire.compressors.kernels.cuda.powersgd import (
    orthogonalize_many,
    powersgd_back_project,
    powersgd_back_project_many,
    powersgd_project,
    powersgd_project_many,
    powersgd_restore,
    powersgd_restore_many,
)
from gradwire.compressors.kernels.cuda.quantize import (
    quantize_decode_pieces,
    quantize_decode_reduce,
    quantize_encode,
    quantize_encode_pieces,
    quantize_reduce_encode,
)
from gradwire.compressors.kernels.cuda.waterfill import (
    waterfill_decode_pieces,
    waterfill_decode_reduce,
    waterfill_encode,
    waterfill_encode_pieces,
    waterfill_reduce_encode,
)

__all__ = [
    "cast_decode_reduce",
    "cast_encode",
    "cast_reduce_encode",
    "chunk_topk_decode_pieces",
    "chunk_topk_decode_reduce",
    "chunk_topk_encode",
    "chunk_topk_encode_pieces",
    "chunk_topk_reduce_encode",
    "dgc_step",
    "dgc_step_many",
    "dgc_sum",
    "onebit_decode_pieces",
    "onebit_decode_reduce",
    "onebit_encode",
    "onebit_encode_pieces",
    "onebit_reduce_encode",
    "orthogonalize_many",
    "powersgd_back_project",
    "powersgd_back_project_many",
    "powersgd_project",
    "powersgd_project_many",
    "powersgd_restore",
    "powersgd_restore_many",
    "quantize_decode_pieces",
    "quantize_decode_reduce",
    "quantize_encode",
    "quantize_encode_pieces",
    "quantize_reduce_encode",
    "scatter_add",
    "waterfill_decode_pieces",
    "waterfill_decode_reduce",
    "waterfill_encode",
    "waterfill_encode_pieces",
    "waterfill_reduce_encode",
]
