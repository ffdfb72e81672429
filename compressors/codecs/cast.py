"""float16 and bfloat16 payloads, float32 sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compressors.base import ALL_REDUCE, Collective, Layout, Member, Request, check_gradient, refuse_capture
from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.two_stage import TwoStage

CAST_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Name of a dtype that values can be cast to -> the dtype."""


@dataclass(frozen=True, slots=True)
class CastCodec(BlockCodec):
    """Rounds p = scale * flat + residual to nearest with ties to even; overflow becomes inf and stays inf.

    Raises:
        ValueError: `name` is neither "float16" nor "bfloat16".

    Source: IEEE 754-2019, section 4.3.1 (round to nearest, ties to even).
    """

    name: str
    """"float16" or "bfloat16"."""
    scale: float = 1.0
    """Factor applied in float32, before the cast, so that a mean that fits in 16 bits stays finite. What is decoded is
    not divided by it."""

    family: ClassVar[str] = "cast"
    alone_from: ClassVar[float] = -0.0

    def __post_init__(self) -> None:
        if self.name not in CAST_DTYPES:
            raise ValueError(f"`dtype` is {self.name!r}; wanted one of {', '.join(CAST_DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in a payload."""
        return CAST_DTYPES[self.name]

    @property
    def parameters(self) -> tuple[float, ...]:
        """(True for float16 or False for bfloat16, scale): the arguments of the kernels."""
        return self.name == "float16", self.scale

    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload: two for each element."""
        return 2 * numel

    def torch_input(self, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """Returns scale * gradient + residual: the values that are cast."""
        p = gradient * self.scale
        return p if residual is None else p + residual

    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Writes the values in the 16-bit dtype to `payload`, and returns what they decode to."""
        values = payload.view(self.dtype)
        values.copy_(p)
        return values.float()

    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Adds the decoded values of `payload` to `total`, in place."""
        total += payload[: 2 * total.numel()].view(self.dtype).float()


class Cast(TwoStage):
    """The compressors "fp16" and "bf16".

    Args:
        name: "fp16" or "bf16".
        plain: Whether to use one all_reduce that sums in the narrow dtype, as torch's fp16_compress_hook does, instead
            of the two-stage exchange, which sums in float32.
        residual: Whether the rounding error is added to the next step's gradient; not with `plain`.
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

    @property
    def by_element(self) -> bool:
        """True without a residual: each element is rounded by itself, so a bucket may be cut anywhere."""
        return not self.residual

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends; with `plain` those of a ring all-reduce of 16-bit values."""
        if self.plain:
            return round(2 * (group_size - 1) / group_size * 2 * layout.numel)
        return super().wire_nbytes(layout, group_size)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """Replaces `shard` by its approximate sum; with `plain` the sum of the rounded values, in 16 bits."""
        if not self.plain or group.size == 1 or self.step < self.warmup_steps or not shard.numel():
            yield from super().all_reduce(shard, layout, group)
            return
        if shard.is_cuda:
            refuse_capture(self.name)
        check_gradient(shard)
        self.prepare(shard.device)
        narrow = torch.empty(shard.numel(), dtype=self.dtype, device=shard.device)
        self.codec.encode(shard, narrow.view(torch.uint8))
        yield Collective(ALL_REDUCE, (narrow,))
        self.codec.decode(narrow.view(torch.uint8), shard)
