"""Every kernel in a few lines of torch: the oracle of the compiled kernels, the fall-back, and their documentation.

Each function has twins of the same name and parameters in compressors/kernels/native.py and compressors/kernels/cuda/;
the protocol `Kernels` in compressors/kernels/dispatch.py lists those that a compressor may call. What the operations of
blocks.py write is the codec's: see `BlockFormat`. They share these conventions:

- `gradient`, `residual`, `new_residual`, `addend` and `target` are 1-D, contiguous, float32 and of one numel, unless
  said otherwise. `residual` is the compression error of earlier payloads and is added to the gradient; `new_residual`
  receives that of this payload, and may be the same memory as `residual`. None stands for no residual, or for one that
  is not kept.
- `payloads` is 2-D uint8, each row as long as the codec's `wire_nbytes` says, or longer: a row for each worker if
  they are summed, a row for each piece if a tensor is cut into pieces. `reduced` is the payload of a sum.
- Outputs are written in place; nothing else is changed, and nothing is returned.
- The reference itself checks nothing. The compiled kernels raise ValueError if a tensor has another dtype, numel or
  device than stated here, or is not contiguous.
"""

from gradwire.compressors.kernels.reference.blocks import decode_pieces, decode_reduce, encode_pieces, reduce_encode
from gradwire.compressors.kernels.reference.dgc import (
    DgcRule,
    DgcRun,
    DgcState,
    dgc_step,
    dgc_step_many,
    dgc_sum,
    scatter_add,
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

__all__ = [
    "DgcRule",
    "DgcRun",
    "DgcState",
    "FactorRun",
    "FactorRuns",
    "decode_pieces",
    "decode_reduce",
    "dgc_step",
    "dgc_step_many",
    "dgc_sum",
    "encode_pieces",
    "orthogonalize",
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
