"""One bit an element: the sign, and the mean magnitude of each block of 1024 elements."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Layout
from gradwire.compressors.cast import CastCodec
from gradwire.compressors.element_scale import ElementScale
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.kernels.reference import onebit_nbytes
from gradwire.compressors.quantize import QuantizeCodec
from gradwire.compressors.residual import ElementStore, Piece
from gradwire.compressors.two_stage import PieceCodec, TwoStage


class OneBitCodec(PieceCodec):
    """Signs and block scales: exactly one bit an element and one float32 for each 1024.

    A block of zeros decodes to zeros; a block with inf or NaN decodes to nothing finite. The scale is the L1 norm
    divided by n, the least-squares choice, which never makes the error larger than the input.
    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4.
    """

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return onebit_nbytes(numel)

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].onebit_encode(flat, residual, new_residual, payload)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`."""
        KERNELS_ON[flat.device.type].onebit_encode_pieces(flat, residual, new_residual, payloads, width)

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        KERNELS_ON[flat.device.type].onebit_decode_pieces(payloads, flat, width)

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].onebit_decode_reduce(payloads, addend, flat)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`."""
        if numel:
            KERNELS_ON[payloads.device.type].onebit_reduce_encode(payloads, residual, new_residual, reduced, numel)


def _return_codec(return_bits: int) -> Codec | None:
    """Returns the codec of the return path; None is the one-bit codec itself."""
    if return_bits not in (1, 8, 16):
        raise ValueError(f"`return_bits` is {return_bits}; wanted 1, 8 or 16")
    return {1: None, 8: QuantizeCodec(8), 16: CastCodec("bfloat16")}[return_bits]


class OneBit(TwoStage):
    """The compressor "onebit": momentum before the compression, a dense start, two residuals, a unit for each element.

    The dense start shows how large each element usually is; afterwards elements are divided by that before their signs
    are taken, and multiplied by it after decoding (see `ElementScale`). Measured: without it the CNN of
    docs/reference/convergence.md ended half a point of accuracy behind plain DDP, with it a tenth.

    Args:
        momentum: Folded in before the compression; the optimizer then runs without. Compressing plain gradients and
            applying momentum afterwards costs several points of accuracy, because what the sign leaves out is many
            gradients large and momentum amplifies it.
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

    def prepare(self, device: torch.device) -> None:
        """See `TwoStage.prepare`."""
        _ = KERNELS_ON[device.type]

    def shared(self) -> Sequence[ElementStore]:
        """See `Stateful.shared`: the units, and the sums that they are made of."""
        return () if self.scale is None else (self.scale,)

    def units_of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """See `TwoStage.units_of`."""
        if self.scale is None:
            return None
        frozen = self.step >= self.warmup_steps
        return self.scale.units(layout, device) if frozen else self.scale.read(layout, device)

    def element_units(self) -> Iterable[Piece]:
        """See `Stateful.element_units`."""
        if self.scale is not None and self.step >= self.warmup_steps:
            yield from (
                replace(each, value=each.value.masked_fill(each.value == 0.0, 1.0)) for each in self.scale.pieces()
            )

    def observe(self, total: Tensor, layout: Layout) -> None:
        """See `TwoStage.observe`."""
        if self.scale is not None:
            self.scale.observe(layout, total)

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`; after the last dense step the elements' units are settled."""
        super().end_step(finite)
        if self.scale is not None:
            self.scale.confirm()
            if (isinstance(finite, Tensor) or finite) and self.step == self.warmup_steps:
                self.scale.freeze(revocable=isinstance(finite, Tensor))

    def retract_step(self) -> None:
        """See `Compressor.retract_step`; units that no step has used become sums again, and the dense start goes on."""
        super().retract_step()
        if self.scale is not None:
            self.scale.revoke()
