"""Every kernel in a few lines of torch: the oracle of the compiled kernels, the fall-back, and their documentation.

Each function has twins of the same name and parameters in compressors/kernels/native.py and compressors/kernels/cuda/;
the protocol `Kernels` in compressors/kernels/dispatch.py lists those that a compressor may call. They share these
conventions:

- `gradient`, `residual`, `new_residual`, `addend` and `target` are 1-D, contiguous, float32 and of one numel, unless
  said otherwise. `residual` is what earlier payloads left out and is added to the gradient; `new_residual` receives
  what this payload leaves out, and may be the same memory as `residual`. None stands for no residual, or for one that
  is not kept.
- `payload` is 1-D uint8, as long as the codec's `..._nbytes` says. `payloads` is 2-D uint8: a row for each worker where
  they are summed, a row for each piece where a tensor is cut into pieces. `reduced` is the payload of a sum.
- Outputs are written in place; nothing else is changed, and nothing is returned.
- The reference itself checks nothing. The compiled kernels raise ValueError where a tensor has another dtype, numel or
  device than stated here, or is not contiguous.
"""

from gradwire.compressors.kernels.reference.cast import cast_decode_reduce, cast_encode, cast_reduce_encode
from gradwire.compressors.kernels.reference.chunk_topk import (
    ChunkRule,
    chunk_topk_decode_pieces,
    chunk_topk_decode_reduce,
    chunk_topk_encode,
    chunk_topk_encode_pieces,
    chunk_topk_nbytes,
    chunk_topk_reduce_encode,
)
from gradwire.compressors.kernels.reference.dgc import (
    DgcRule,
    DgcRun,
    DgcState,
    dgc_step,
    dgc_step_many,
    dgc_sum,
    scatter_add,
)
from gradwire.compressors.kernels.reference.exponents import (
    EXPONENTS_BLOCK,
    exponents_most_nbytes,
    exponents_nbytes,
    exponents_pack,
    exponents_unpack,
)
from gradwire.compressors.kernels.reference.onebit import (
    ONEBIT_BLOCK,
    onebit_decode_pieces,
    onebit_decode_reduce,
    onebit_encode,
    onebit_encode_pieces,
    onebit_nbytes,
    onebit_reduce_encode,
)
from gradwire.compressors.kernels.reference.powersgd import (
    FactorRun,
    FactorRuns,
    orthogonalize,
    orthogonalize_many,
    powersgd_back_project,
    powersgd_back_project_many,
    powersgd_project,
    powersgd_project_many,
    powersgd_restore,
    powersgd_restore_many,
)
from gradwire.compressors.kernels.reference.quantize import (
    QUANTIZE_BLOCK,
    quantize_decode_pieces,
    quantize_decode_reduce,
    quantize_encode,
    quantize_encode_pieces,
    quantize_nbytes,
    quantize_reduce_encode,
)
from gradwire.compressors.kernels.reference.waterfill import (
    WATERFILL_BITS,
    WATERFILL_GROUP,
    waterfill_decode_pieces,
    waterfill_decode_reduce,
    waterfill_encode,
    waterfill_encode_pieces,
    waterfill_nbytes,
    waterfill_reduce_encode,
)

__all__ = [
    "EXPONENTS_BLOCK",
    "ONEBIT_BLOCK",
    "QUANTIZE_BLOCK",
    "WATERFILL_BITS",
    "WATERFILL_GROUP",
    "ChunkRule",
    "DgcRule",
    "DgcRun",
    "DgcState",
    "FactorRun",
    "FactorRuns",
    "cast_decode_reduce",
    "cast_encode",
    "cast_reduce_encode",
    "chunk_topk_decode_pieces",
    "chunk_topk_decode_reduce",
    "chunk_topk_encode",
    "chunk_topk_encode_pieces",
    "chunk_topk_nbytes",
    "chunk_topk_reduce_encode",
    "dgc_step",
    "dgc_step_many",
    "dgc_sum",
    "exponents_most_nbytes",
    "exponents_nbytes",
    "exponents_pack",
    "exponents_unpack",
    "onebit_decode_pieces",
    "onebit_decode_reduce",
    "onebit_encode",
    "onebit_encode_pieces",
    "onebit_nbytes",
    "onebit_reduce_encode",
    "orthogonalize",
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
    "quantize_nbytes",
    "quantize_reduce_encode",
    "scatter_add",
    "waterfill_decode_pieces",
    "waterfill_decode_reduce",
    "waterfill_encode",
    "waterfill_encode_pieces",
    "waterfill_nbytes",
    "waterfill_reduce_encode",
]
