"""Packing many CUDA tensors into one bucket and back, in one launch: csrc/cuda/pack.cu."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import check_tensors

_CHUNK = 8192
"""kChunk of csrc/cuda/pack.cu: elements of one CTA's work."""
_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class PackTable:
    """Where the tensors of a bucket lie, on the device: written once, used in every step.

    The tensors are kept alive and must keep their memory: where gradients are allocated anew in each step
    (`zero_grad(set_to_none=True)`), each step needs a new table.

    Args:
        tensors: Contiguous, of one dtype (float32, float16 or bfloat16), on one CUDA device.
        offsets: Where each begins in the bucket, in elements.
        scale: Factor applied in float32 to every element, before the cast.

    Raises:
        ValueError: There are no tensors, they differ in dtype or device, or one does not fit a kernel.
    """

    def __init__(self, tensors: Sequence[Tensor], offsets: Sequence[int], scale: float = 1.0) -> None:
        if not tensors or len(tensors) != len(offsets):
            raise ValueError(f"`tensors` are {len(tensors)}, `offsets` {len(offsets)}; wanted as many, one at least")
        self._tensors, first = tuple(tensors), tensors[0]
        if first.dtype not in _FORMATS:
            raise ValueError(f"`tensors` are {first.dtype}; wanted {', '.join(map(str, _FORMATS))}")
        self.device, self.dtype, self._chunks, words = first.device, first.dtype, 0, []
        (scale_bits,) = struct.unpack("<I", struct.pack("<f", scale))
        self._ends = max(offset + tensor.numel() for tensor, offset in zip(tensors, offsets, strict=True))
        for tensor, offset in zip(tensors, offsets, strict=True):
            check_tensors(self.device, tensor.numel(), self.dtype, tensors=tensor)
            if offset < 0:
                raise ValueError(f"`offsets` hold {offset}; wanted 0 or more")
            if tensor.numel():
                words += [tensor.data_ptr(), offset, tensor.numel(), self._chunks, scale_bits]
                self._chunks += -(-tensor.numel() // _CHUNK)
        self._count, self._words = len(words) // 5, words

    def _launch(self, direction: str, bucket: Tensor) -> None:
        if bucket.dtype not in _FORMATS or bucket.numel() < self._ends:
            raise ValueError(
                f"`bucket` is {tuple(bucket.shape)} {bucket.dtype}; wanted at least {self._ends} elements "
                f"of {', '.join(map(str, _FORMATS))}"
            )
        check_tensors(self.device, bucket.numel(), bucket.dtype, bucket=bucket)
        table = cuda_launch.upload(self._words, self.device)
        blocks = cuda_launch.blocks_for(self.device, cuda_launch.THREADS * self._chunks)
        cuda_launch.launch(
            "pack",
            f"{direction}_{_FORMATS[self.dtype]}_{_FORMATS[bucket.dtype]}",
            self.device,
            blocks,
            (table.data_ptr(), self._count, self._chunks, bucket.data_ptr()),
        )

    def pack(self, bucket: Tensor) -> None:
        """Writes every tensor into `bucket`; see reference.pack.pack.

        Args:
            bucket: 1-D float32, float16 or bfloat16 on the tensors' device; overwritten where the tensors lie.

        Raises:
            ValueError: `bucket` has another dtype or device, or is too short.
        """
        self._launch("pack", bucket)

    def unpack(self, bucket: Tensor) -> None:
        """Writes the elements of `bucket` back into every tensor; see reference.pack.unpack.

        Args:
            bucket: 1-D float32, float16 or bfloat16 on the tensors' device.

        Raises:
            ValueError: `bucket` has another dtype or device, or is too short.
        """
        self._launch("unpack", bucket)
