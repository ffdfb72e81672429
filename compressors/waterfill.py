"""waterfill5 to waterfill2: a few bits an element, more where elements are large and fewer where they are small."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.reference import WATERFILL_BITS, waterfill_nbytes
from gradwire.compressors.two_stage import PieceCodec, TwoStage


@dataclass(frozen=True, slots=True)
class WaterfillCodec(PieceCodec):
    """`bits` bits an element, scales included, shared out between the blocks of 32 of each 16,384 elements.

    A block of zeros decodes to zeros; 16,384 elements with inf or NaN among them decode to NaN.

    Raises:
        ValueError: `bits` is out of range.

    Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
    """

    bits: int
    """2 to 5."""

    def __post_init__(self) -> None:
        if self.bits not in WATERFILL_BITS:
            raise ValueError(f"`bits` is {self.bits}; wanted one of {', '.join(map(str, WATERFILL_BITS))}")

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return waterfill_nbytes(numel, self.bits)

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].waterfill_encode(self.bits, flat, residual, new_residual, payload)

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].waterfill_decode_reduce(self.bits, payloads, addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`."""
        KERNELS_ON[flat.device.type].waterfill_encode_pieces(self.bits, flat, residual, new_residual, payloads, width)

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        KERNELS_ON[flat.device.type].waterfill_decode_pieces(self.bits, payloads, flat, width)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`."""
        if numel:
            KERNELS_ON[payloads.device.type].waterfill_reduce_encode(
                self.bits, payloads, residual, new_residual, reduced, numel
            )


class Waterfill(TwoStage):
    """The compressors "waterfill5", "waterfill4", "waterfill3" and "waterfill2".

    Args:
        name: "waterfill5" for 5 bits an element, and so on.
        residual: Feed the rounding error back.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    def __init__(self, name: str, *, residual: bool = True, warmup_steps: int = 0) -> None:
        codec = WaterfillCodec(int(name.removeprefix("waterfill")))
        super().__init__(name, codec, residual=residual, warmup_steps=warmup_steps)

    def prepare(self, device: torch.device) -> None:
        """See `TwoStage.prepare`."""
        _ = KERNELS_ON[device.type]
