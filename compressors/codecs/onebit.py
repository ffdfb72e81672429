"""One bit an element: the sign, and the mean magnitude of each block of 1024 elements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Layout
from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.element_scale import ElementScale
from gradwire.compressors.residual import ElementStore, Piece
from gradwire.compressors.two_stage import TwoStage

ONEBIT_BLOCK = 1024
"""Elements that share a scale: small enough to follow a layer's scale, large enough that 4 bytes cost 3 %."""


def _scales(p: Tensor) -> Tensor:
    """Returns each block's mean magnitude, summed in a fixed order: 64 running sums, then a tree of halves."""
    blocks = -(-p.numel() // ONEBIT_BLOCK)
    padded = torch.zeros(blocks * ONEBIT_BLOCK, dtype=torch.float32, device=p.device)
    padded[: p.numel()] = p.abs()
    sums = torch.zeros(blocks, 64, dtype=torch.float32, device=p.device)
    for row in padded.view(blocks, -1, 64).unbind(1):
        sums = sums + row
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    counts = torch.full((blocks,), float(ONEBIT_BLOCK), dtype=torch.float32, device=p.device)
    counts[-1:] = p.numel() - (blocks - 1) * ONEBIT_BLOCK
    return sums.view(-1) / counts


def _magnitudes(scales: Tensor, numel: int) -> Tensor:
    """Returns the scale of each element's block, (numel) float32, from the scales of the blocks."""
    return scales.repeat_interleave(ONEBIT_BLOCK)[:numel]


@dataclass(frozen=True, slots=True)
class OneBitCodec(BlockCodec):
    """Signs and block scales: exactly one bit an element and one float32 for each 1024.

    A block of zeros decodes to zeros; a block with inf or NaN decodes to nothing finite. The scale is the L1 norm
    divided by n, the least-squares choice, which never makes the error larger than the input.
    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4.
    """

    family: ClassVar[str] = "onebit"

    @lru_cache(maxsize=1024)  # noqa: B019 - codecs are values, and every step asks for the same lengths
    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload: a float32 scale for each block, and a bit for each element."""
        return -(-numel // ONEBIT_BLOCK) * 4 + -(-numel // 8)

    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Writes the blocks' float32 scales, then the signs (1 where p >= 0), and returns the decoded values.

        Of eight signs in a byte the first is the lowest bit.
        """
        scales = _scales(p)
        signs = p >= 0
        weights = (2 ** torch.arange(8, device=p.device)).to(torch.uint8)
        padded = torch.zeros(-(-p.numel() // 8) * 8, dtype=torch.uint8, device=p.device)
        padded[: p.numel()] = signs
        payload.copy_(torch.cat([scales.view(torch.uint8), (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)]))
        magnitudes = _magnitudes(scales, p.numel())
        return torch.where(signs, magnitudes, -magnitudes)

    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Adds the decoded values of `payload`, plus or minus the scale of their block, to `total`, in place."""
        numel = total.numel()
        blocks = -(-numel // ONEBIT_BLOCK)
        scales = payload[: 4 * blocks].clone().view(torch.float32)
        bits = payload[4 * blocks : 4 * blocks + -(-numel // 8)]
        signs = (bits.unsqueeze(1) >> torch.arange(8, device=payload.device) & 1).view(-1)[:numel].bool()
        magnitudes = _magnitudes(scales, numel)
        total += torch.where(signs, magnitudes, -magnitudes)


def _return_codec(return_bits: int) -> Codec | None:
    """Returns the codec of the return path; None for 1 bit, which takes the one-bit codec itself.

    Raises:
        ValueError: `return_bits` is not 1, 8 or 16.
    """
    if return_bits not in (1, 8, 16):
        raise ValueError(f"`return_bits` is {return_bits}; wanted 1, 8 or 16")
    return {1: None, 8: QuantizeCodec(8), 16: CastCodec("bfloat16")}[return_bits]


class OneBit(TwoStage):
    """The compressor "onebit": momentum before the compression, a dense start, two residuals, a scale for each element.

    The dense start shows how large each element usually is; afterwards elements are divided by that before their signs
    are taken, and multiplied by it after decoding (see `ElementScale`). Measured: without it the CNN of
    docs/results/convergence.md ended half a point of accuracy behind plain DDP, with it a tenth.

    Args:
        momentum: Factor of the momentum that is applied before the compression; the optimizer then runs without.
            Compressing plain gradients and applying momentum afterwards costs several points of accuracy, because the
            compression error of the sign is many gradients large and momentum amplifies it.
        warmup_steps: Steps at the start whose gradients are sent dense; 0 also means that all elements of a block count
            as equally large.
        return_bits: Bits an element on the return path, from the owners to all: 1, 8 (int8) or 16 (bfloat16). More bits
            cost bytes and make the error of the second quantisation smaller.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(self, *, momentum: float = 0.9, warmup_steps: int = 100, return_bits: int = 1) -> None:
        super().__init__(
            "onebit",
            OneBitCodec(),
            return_codec=_return_codec(return_bits),
            momentum=momentum,
            warmup_steps=warmup_steps,
        )
        self.scale = ElementScale() if warmup_steps else None
        if self.scale is not None:
            self.fields["scale"] = self.scale

    def shared(self) -> Sequence[ElementStore]:
        """Returns the store of the elements' scales (before they are fixed, of the sums that they are made of)."""
        return () if self.scale is None else (self.scale,)

    def scales_of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Returns the usual magnitude of each element, (layout.numel) float32; None without a dense start."""
        if self.scale is None:
            return None
        frozen = self.step >= self.warmup_steps
        return self.scale.scales(layout, device) if frozen else self.scale.read(layout, device)

    def element_scales(self) -> Iterable[Piece]:
        """Yields the elements' scales once they are fixed: stored residuals are divided by them."""
        if self.scale is not None and self.step >= self.warmup_steps:
            yield from (
                replace(each, value=each.value.masked_fill(each.value == 0.0, 1.0)) for each in self.scale.pieces()
            )

    def observe(self, total: Tensor, layout: Layout) -> None:
        """Adds the sum of a dense step to the magnitudes from which the elements' scales are made."""
        if self.scale is not None:
            self.scale.observe(layout, total)

    def end_step(self, finite: bool | Tensor) -> None:
        """Commits or drops the staged state; after the last dense step the elements' scales are fixed."""
        super().end_step(finite)
        if self.scale is not None:
            self.scale.confirm()
            if (isinstance(finite, Tensor) or finite) and self.step == self.warmup_steps:
                self.scale.freeze(revocable=isinstance(finite, Tensor))

    def retract_step(self) -> None:
        """Takes the last step out of the count; scales that it fixed become sums again, and the dense start goes on."""
        super().retract_step()
        if self.scale is not None:
            self.scale.revoke()
