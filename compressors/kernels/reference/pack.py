"""Many tensors into one bucket and back, scaled and cast.

No compressor packs, so `Kernels` does not list these: the native twins are in compressors/kernels/native.py, and the
CUDA twin is `PackTable` in compressors/kernels/cuda/pack.py.
"""

from collections.abc import Sequence

from torch import Tensor


def pack(tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, bucket: Tensor) -> None:
    """Writes each tensor times `scale`, computed in float32, into `bucket` from its offset on.

    Args:
        tensors: float32, float16 or bfloat16, any shapes.
        offsets: Where each begins in the bucket, in elements.
        scale: Factor applied in float32, before the cast to the bucket's dtype.
        bucket: 1-D float32, float16 or bfloat16; overwritten where the tensors lie, and nowhere else.
    """
    for tensor, offset in zip(tensors, offsets, strict=True):
        bucket[offset : offset + tensor.numel()] = tensor.flatten().float() * scale


def unpack(tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, bucket: Tensor) -> None:
    """Writes the bucket's elements times `scale`, computed in float32, back into each tensor.

    Args:
        tensors: float32, float16 or bfloat16, any shapes; overwritten.
        offsets: Where each begins in the bucket, in elements.
        scale: Factor applied in float32, before the cast to the tensor's dtype.
        bucket: 1-D float32, float16 or bfloat16.
    """
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.copy_((bucket[offset : offset + tensor.numel()].float() * scale).view_as(tensor))
