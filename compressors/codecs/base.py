"""Interfaces of codecs with fused stages, an adapter to them for any codec, and the base of codecs with kernels."""

from abc import abstractmethod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.compressors.base import Codec
from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.dispatch import KERNELS_ON


@runtime_checkable
class FusedCodec(Codec, Protocol):
    """A codec that also handles the residual, and the sum of several payloads, without an extra pass over memory.

    A subclass inherits `encode` and `decode`, and implements the other methods.
    """

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """Encodes `flat`, 1-D float32, into `payload` without a residual, by `encode_residual`."""
        self.encode_residual(flat, None, None, payload)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        """Overwrites `flat`, 1-D float32, with the approximation in `payload`, by `decode_reduce` of one payload."""
        self.decode_reduce(payload.unsqueeze(0), None, flat)

    @abstractmethod
    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """Encodes p = flat + residual into a payload, and keeps the compression error.

        Args:
            flat: (n) float32; not changed.
            residual: (n) float32 compression error of earlier payloads; None for none.
            new_residual: (n) float32, overwritten with p - decode(payload); may be `residual`; None discards it.
            payload: (wire_nbytes(n)) uint8, overwritten.
        """

    @abstractmethod
    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `flat`.

        Args:
            payloads: (workers, wire_nbytes(n)) uint8; rows may be apart.
            addend: (n) float32 that the sum starts from; None starts from zero.
            flat: (n) float32, overwritten.
        """


@runtime_checkable
class PieceCodec(FusedCodec, Protocol):
    """A codec that does each stage of the exchange in one call: one launch on CUDA, however many owners there are."""

    @abstractmethod
    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """Encodes each run of `width` elements of flat + residual into its row of `payloads`, as encode_residual.

        Args:
            flat: (n) float32, n >= 1.
            residual: (n) float32, or None.
            new_residual: (n) float32, overwritten with the compression error; may be `residual`, or None.
            payloads: (pieces, wire_nbytes(width)) uint8; each row is overwritten up to its payload's own size, and all
                of it if the piece is full.
            width: Elements of a piece; the last piece may be shorter.
        """

    @abstractmethod
    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """Decodes each row of `payloads` into its run of `width` elements of `flat`.

        Args:
            payloads: (pieces, wire_nbytes(width)) uint8.
            flat: (n) float32, n >= 1, overwritten.
            width: Elements of a piece; the last piece may be shorter.
        """

    @abstractmethod
    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """Encodes the sum of the decoded payloads plus `residual`: the owner's stage.

        Args:
            payloads: (workers, wire_nbytes(numel)) uint8; rows may be apart.
            residual: (numel) float32, or None.
            new_residual: (numel) float32, overwritten with the error of `reduced`; may be `residual`, or None.
            reduced: (wire_nbytes(numel)) uint8, overwritten.
            numel: Elements of the owner's part; may be 0.
        """


class InPieces(PieceCodec):
    """Adapts any codec to `PieceCodec`: handles one piece after the other, with separate steps for the residual.

    Payloads are cleared before they are written: a user's codec need not write every byte, and no old memory is sent.

    Args:
        codec: The codec that encodes and decodes each piece.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._fused = codec if isinstance(codec, FusedCodec) else None

    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of the payload of `numel` elements, as the adapted codec does."""
        return self._codec.wire_nbytes(numel)

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """Encodes flat + residual and stores the compression error, in separate steps unless the codec fuses them."""
        payload.zero_()
        if self._fused is not None:
            self._fused.encode_residual(flat, residual, new_residual, payload)
            return
        p = flat if residual is None else flat + residual
        self._codec.encode(p, payload)
        if new_residual is not None:
            decoded = torch.empty_like(p)
            self._codec.decode(payload, decoded)
            torch.sub(p, decoded, out=new_residual)

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes `addend` plus the decoded payloads, added in their order, into `flat`."""
        if self._fused is not None:
            self._fused.decode_reduce(payloads, addend, flat)
            return
        decoded = torch.empty_like(flat)
        flat.zero_() if addend is None else flat.copy_(addend)
        for payload in payloads:
            self._codec.decode(payload, decoded)
            flat.add_(decoded)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """Encodes one run of `width` elements after the other into its row of `payloads`."""
        for start, row in zip(range(0, flat.numel(), width), payloads, strict=False):
            run = slice(start, start + width)
            piece = flat[run]
            old, new = (None if each is None else each[run] for each in (residual, new_residual))
            self.encode_residual(piece, old, new, row[: self.wire_nbytes(piece.numel())])

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """Decodes one row of `payloads` after the other into its run of `width` elements of `flat`."""
        for start, row in zip(range(0, flat.numel(), width), payloads, strict=False):
            piece = flat[start : start + width]
            self._codec.decode(row[: self.wire_nbytes(piece.numel())], piece)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """Decodes and sums all payloads, then encodes the sum plus `residual` into `reduced`."""
        total = torch.empty(numel, dtype=torch.float32, device=payloads.device)
        self.decode_reduce(payloads, None, total)
        self.encode_residual(total, residual, new_residual, reduced)


def in_pieces(codec: Codec) -> PieceCodec:
    """Returns `codec` itself if it is a `PieceCodec`, else an adapter around it."""
    return codec if isinstance(codec, PieceCodec) else InPieces(codec)


class BlockCodec(BlockFormat, PieceCodec):
    """Base of codecs with kernels: each method calls the kernels of the tensors' device.

    A subclass describes its payloads by the methods of `BlockFormat`, and inherits everything else.
    """

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """Encodes flat + residual into `payload`, as a single piece; does nothing for an empty tensor."""
        if flat.numel():
            self.encode_pieces(flat, residual, new_residual, payload.unsqueeze(0), flat.numel())

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes `addend` plus the decoded payloads into `flat`, by the kernels of its device."""
        if flat.numel():
            KERNELS_ON[flat.device.type].decode_reduce(self, payloads, addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """Encodes each run of `width` elements into its row of `payloads`, by the kernels of its device."""
        if flat.numel():
            KERNELS_ON[flat.device.type].encode_pieces(self, flat, residual, new_residual, payloads, width)

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """Decodes each row of `payloads` into its run of `width` elements, by the kernels of its device."""
        if flat.numel():
            KERNELS_ON[flat.device.type].decode_pieces(self, payloads, flat, width)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """Encodes the sum of the decoded payloads plus `residual`, by the kernels of their device."""
        if numel:
            KERNELS_ON[payloads.device.type].reduce_encode(self, payloads, residual, new_residual, reduced, numel)
