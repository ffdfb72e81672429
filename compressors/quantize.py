"""int8 and int4: block-wise min-max quantisation, to nearest or with unbiased random rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Layout
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.hashing import mix_key, name_key
from gradwire.compressors.kernels.reference import quantize_nbytes
from gradwire.compressors.two_stage import PieceCodec, TwoStage


@dataclass(frozen=True, slots=True)
class QuantizeCodec(PieceCodec):
    """2^bits levels between the smallest and the largest element of each block of 512.

    A block of equal elements decodes exactly; a block with inf or NaN decodes to NaN.
    """

    bits: int
    """4 or 8."""
    key: int | None = None
    """Rounds by a hash of this key and the element's index; None rounds to nearest."""

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return quantize_nbytes(numel, self.bits)

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].quantize_encode(self.bits, flat, residual, new_residual, payload, self.key)

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].quantize_decode_reduce(self.bits, payloads, addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`."""
        KERNELS_ON[flat.device.type].quantize_encode_pieces(
            self.bits, flat, residual, new_residual, payloads, width, self.key
        )

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        KERNELS_ON[flat.device.type].quantize_decode_pieces(self.bits, payloads, flat, width)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`."""
        if numel:
            KERNELS_ON[payloads.device.type].quantize_reduce_encode(
                self.bits, payloads, residual, new_residual, reduced, numel, self.key
            )


class Quantize(TwoStage):
    """The compressors "int8" and "int4".

    Args:
        name: "int8" or "int4".
        stochastic: Round at random without bias, instead of to the nearest level.
        seed: Of the random rounding; the numbers depend on (seed, step, rank, parameter, element) alone.
        residual: Feed the rounding error back.
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

    def prepare(self, device: torch.device) -> None:
        """See `TwoStage.prepare`."""
        _ = KERNELS_ON[device.type]

    def codec_for(self, layout: Layout, rank: int) -> Codec:
        """See `TwoStage.codec_for`."""
        if not self.stochastic:
            return self.codec
        first = layout.slices[0]
        key = mix_key(self.seed, self.step, rank, name_key(first.name), first.parameter_start)
        return QuantizeCodec(self.bits, key)
