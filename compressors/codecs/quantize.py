"""int8 and int4: block-wise min-max quantisation, to nearest or with unbiased random rounding."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compressors.base import Layout
from gradwire.compressors.codecs.base import BlockCodec, PieceCodec
from gradwire.compressors.kernels.hashing import hash_uniforms, mix_key, name_key
from gradwire.compressors.two_stage import TwoStage

QUANTIZE_BLOCK = 512
"""Elements that share a range. Source: Alistarh et al., QSGD, NeurIPS 2017, section 5 (buckets of 512 for 4 bits)."""
_SMALLEST_NORMAL = 2.0**-126
"""Smallest normal float32: below it 1 / step is inf, so such a range is empty. Source: IEEE 754-2019, binary32."""


@dataclass(frozen=True, slots=True)
class QuantizeCodec(BlockCodec):
    """2^bits levels between the smallest and the largest element of each block of 512.

    A block of equal elements decodes exactly; a block with inf or NaN decodes to NaN.
    Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (blocks, random rounding).
    """

    bits: int
    """4 or 8."""
    key: int | None = None
    """32 bits: rounds at random, without bias, by a hash of this key and the element's index in its piece; None rounds
    to nearest."""

    family: ClassVar[str] = "quantize"

    @property
    def parameters(self) -> tuple[float, ...]:
        """(bits, whether rounding is random, key or 0): the arguments of the kernels."""
        return self.bits, self.key is not None, self.key or 0

    @lru_cache(maxsize=1024)  # noqa: B019 - codecs are values, and every step asks for the same lengths
    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload: two float32 for each block, and `bits` for each element."""
        return -(-numel // QUANTIZE_BLOCK) * 8 + -(-numel * self.bits // 8)

    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Writes (step, low) in float32 for each block, then the codes, and returns the decoded values.

        Of two 4-bit codes in a byte the even element's is the lower. An element decodes to low + code * step.
        """
        levels, numel = float(2**self.bits - 1), p.numel()
        blocks = -(-numel // QUANTIZE_BLOCK)
        last = p[(blocks - 1) * QUANTIZE_BLOCK]
        rows = torch.cat([p, last.expand(blocks * QUANTIZE_BLOCK - numel)]).view(blocks, -1)
        low, high = rows.amin(1) + 0.0, rows.amax(1)
        spread = high - low
        step = torch.where(spread.isfinite(), spread / levels, high / levels - low / levels)
        step = torch.where(step < _SMALLEST_NORMAL, 0.0, step)
        inverse = torch.where(step > 0, 1.0 / step, 0.0)
        offsets = torch.tensor(0.5, dtype=torch.float32, device="cpu")
        if self.key is not None:
            offsets = hash_uniforms(self.key, rows.numel(), p.device).view_as(rows)
        codes = ((rows - low[:, None]) * inverse[:, None] + offsets).clamp(max=levels)
        finite = rows.isfinite().all(1)
        codes = torch.where(finite[:, None], codes, 0.0).to(torch.uint8)
        nan = torch.tensor(torch.nan, dtype=torch.float32, device=p.device)
        step, low = torch.where(finite, step, nan), torch.where(finite, low, nan)
        decoded = (low[:, None] + codes.float() * step[:, None]).view(-1)[:numel]
        flat = codes.view(-1)[:numel]
        if self.bits == 4:
            flat = torch.cat([flat, flat.new_zeros(numel % 2)])
            flat = flat[0::2] | flat[1::2] << 4
        payload.copy_(torch.cat([torch.stack([step, low], 1).view(-1).view(torch.uint8), flat]))
        return decoded

    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Adds the decoded values of `payload`, low + step * code, to `total`, in place."""
        numel = total.numel()
        blocks = -(-numel // QUANTIZE_BLOCK)
        numbers = payload[: 8 * blocks].clone().view(torch.float32).view(blocks, 2)
        codes = payload[8 * blocks : 8 * blocks + -(-numel * self.bits // 8)]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel]
        step, low = (each.repeat_interleave(QUANTIZE_BLOCK)[:numel] for each in numbers.unbind(1))
        total += low + codes.float() * step


class Quantize(TwoStage):
    """The compressors "int8" and "int4".

    Args:
        name: "int8" or "int4".
        stochastic: Whether to round at random without bias, instead of to the nearest level.
        seed: Seed of the random rounding; the numbers depend on (seed, step, rank, parameter, element) alone.
        residual: Whether the rounding error is added to the next step's gradient.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    def __init__(
        self, name: str, *, stochastic: bool = False, seed: int = 0, residual: bool = True, warmup_steps: int = 0
    ) -> None:
        self.bits = {"int8": 8, "int4": 4}[name]
        super().__init__(name, QuantizeCodec(self.bits), residual=residual, warmup_steps=warmup_steps)
        self.stochastic = stochastic
        self.seed = seed

    def random_codec(self, layout: Layout, rank: int) -> PieceCodec:
        """Returns a codec whose random key differs in each step, shard and rank: rounding errors are independent."""
        first = layout.slices[0]
        key = mix_key(self.seed, self.step, rank, name_key(first.name), first.parameter_start)
        return QuantizeCodec(self.bits, key)
