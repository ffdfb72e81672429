"""float16 and bfloat16 payloads, float32 sums."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.compressors.base import ALL_REDUCE, Collective, Layout, Member, Request, check_gradient, refuse_capture
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.two_stage import PieceCodec, TwoStage

CAST_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""What a cast can narrow to, by torch's name."""


class CastCodec(PieceCodec):
    """Rounds to float16 or bfloat16, to nearest with ties to even; overflow becomes inf and stays inf.

    Args:
        dtype: "float16" or "bfloat16".

    Raises:
        ValueError: `dtype` is neither.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in CAST_DTYPES:
            raise ValueError(f"`dtype` is {dtype!r}; wanted one of {', '.join(CAST_DTYPES)}")
        self.dtype = CAST_DTYPES[dtype]

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return 2 * numel

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].cast_encode(flat, 1.0, residual, new_residual, payload.view(self.dtype))

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].cast_decode_reduce(payloads.view(self.dtype), addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`: side by side, the payloads are the payload of the whole tensor."""
        self.encode_residual(flat, residual, new_residual, payloads.view(-1)[: self.wire_nbytes(flat.numel())])

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        self.decode(payloads.view(-1)[: self.wire_nbytes(flat.numel())], flat)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`."""
        if numel:
            KERNELS_ON[payloads.device.type].cast_reduce_encode(
                payloads.view(self.dtype), residual, new_residual, reduced.view(self.dtype)
            )


class Cast(TwoStage):
    """The compressors "fp16" and "bf16".

    Args:
        name: "fp16" or "bf16".
        plain: One narrow all_reduce, summed in the narrow dtype, instead of the two-stage exchange that sums in
            float32: what torch's fp16_compress_hook does.
        residual: Feed the rounding error back; not with `plain`.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `residual` is True with `plain`, or `warmup_steps` is negative.
    """

    def __init__(self, name: str, *, plain: bool = False, residual: bool = False, warmup_steps: int = 0) -> None:
        if plain and residual:
            raise ValueError("`residual` is True with `plain`; a narrow sum has no residual to feed back: drop one")
        codec = CastCodec({"fp16": "float16", "bf16": "bfloat16"}[name])
        super().__init__(name, codec, residual=residual, warmup_steps=warmup_steps)
        self.dtype = codec.dtype
        self.plain = plain

    def prepare(self, device: torch.device) -> None:
        """See `TwoStage.prepare`."""
        _ = KERNELS_ON[device.type]

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`."""
        if self.plain:
            return round(2 * (group_size - 1) / group_size * 2 * layout.numel)
        return super().wire_nbytes(layout, group_size)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """See `Compressor.all_reduce`."""
        if not self.plain or group.size == 1 or self.step < self.warmup_steps or not shard.numel():
            yield from super().all_reduce(shard, layout, group)
            return
        if shard.is_cuda:
            refuse_capture(self.name)
        check_gradient(shard)
        self.prepare(shard.device)
        narrow = torch.empty(shard.numel(), dtype=self.dtype, device=shard.device)
        KERNELS_ON[shard.device.type].cast_encode(shard, 1.0, None, None, narrow)
        yield Collective(ALL_REDUCE, (narrow,))
        KERNELS_ON[shard.device.type].cast_decode_reduce(narrow.unsqueeze(0), None, shard)
