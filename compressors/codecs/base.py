"""What codecs offer the exchange beyond `Codec`, the same for any codec, and the codecs that have kernels."""

import functools
from abc import abstractmethod
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from gradwire.compressors.base import Codec
from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.dispatch import KERNELS_ON


@runtime_checkable
class FusedCodec(Codec, Protocol):
    """A codec that also handles the residual, and the sum of several payloads, without an extra pass over memory.

    A class that names it as its base has `encode` and `decode` by it, and must have the others.
    """

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """See `Codec.encode`."""
        self.encode_residual(flat, None, None, payload)

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        """See `Codec.decode`."""
        self.decode_reduce(payload.unsqueeze(0), None, flat)

    @abstractmethod
    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """Encodes p = flat + residual.

        Args:
            flat: (n) float32.
            residual: (n) float32, or None.
            new_residual: (n) float32, overwritten with p - decode(payload); may be `residual`, or None.
            payload: (wire_nbytes(n)) uint8, overwritten.
        """

    @abstractmethod
    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `flat`.

        Args:
            payloads: (workers, wire_nbytes(n)) uint8; rows may be apart.
            addend: (n) float32, or None.
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
            new_residual: (n) float32, overwritten with what the payloads leave out; may be `residual`, or None.
            payloads: (pieces, wire_nbytes(width)) uint8; each row is overwritten up to its payload's own size, and all
                of it where the piece is full.
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
            new_residual: (numel) float32, overwritten with what `reduced` leaves out; may be `residual`, or None.
            reduced: (wire_nbytes(numel)) uint8, overwritten.
            numel: Elements of the owner's part; may be 0.
        """


@functools.cache
def _offers(kind: type, protocol: type) -> bool:
    """Whether a class has a protocol's methods: asked of `typing` it takes 10 us, and each bucket asks five times."""
    return issubclass(kind, protocol)


def _is_fused(codec: Codec) -> TypeGuard[FusedCodec]:
    return _offers(type(codec), FusedCodec)


def takes_pieces(codec: Codec) -> TypeGuard[PieceCodec]:
    """Whether a codec does each stage of the exchange in one call."""
    return _offers(type(codec), PieceCodec)


def encode(codec: Codec, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor) -> None:
    """Does what FusedCodec.encode_residual does, with any codec."""
    if _is_fused(codec):
        codec.encode_residual(flat, residual, new_residual, payload)
        return
    p = flat if residual is None else flat + residual
    codec.encode(p, payload)
    if new_residual is not None:
        decoded = torch.empty_like(p)
        codec.decode(payload, decoded)
        torch.sub(p, decoded, out=new_residual)


def encode_pieces(
    codec: Codec, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """Does what PieceCodec.encode_pieces does, with any codec and any number of elements."""
    if not flat.numel():
        return
    if takes_pieces(codec):
        codec.encode_pieces(flat, residual, new_residual, payloads, width)
        return
    for start, row in zip(range(0, flat.numel(), width), payloads, strict=False):
        run = slice(start, start + width)
        piece = flat[run]
        old, new = (None if each is None else each[run] for each in (residual, new_residual))
        encode(codec, piece, old, new, row[: codec.wire_nbytes(piece.numel())])


def decode_pieces(codec: Codec, payloads: Tensor, flat: Tensor, width: int) -> None:
    """Does what PieceCodec.decode_pieces does, with any codec and any number of elements."""
    if not flat.numel():
        return
    if takes_pieces(codec):
        codec.decode_pieces(payloads, flat, width)
        return
    for start, row in zip(range(0, flat.numel(), width), payloads, strict=False):
        piece = flat[start : start + width]
        codec.decode(row[: codec.wire_nbytes(piece.numel())], piece)


def decode_sum(codec: Codec, payloads: Tensor, flat: Tensor) -> None:
    """Does what FusedCodec.decode_reduce does without an addend, with any codec."""
    if _is_fused(codec):
        codec.decode_reduce(payloads, None, flat)
        return
    decoded = torch.empty_like(flat)
    flat.zero_()
    for payload in payloads:
        codec.decode(payload, decoded)
        flat.add_(decoded)


def reduce_encode(
    codec: Codec,
    return_codec: Codec,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """Does what PieceCodec.reduce_encode does, with any two codecs: `return_codec` encodes the sum."""
    if return_codec is codec and takes_pieces(codec):
        codec.reduce_encode(payloads, residual, new_residual, reduced, numel)
        return
    total = torch.empty(numel, device=payloads.device)
    decode_sum(codec, payloads, total)
    encode(return_codec, total, residual, new_residual, reduced)


class BlockCodec(BlockFormat, PieceCodec):
    """A codec with kernels: those of the tensors' device do all of its work.

    A class that names it as its base describes its payloads as `BlockFormat` says, and has everything else by it.
    """

    def encode_residual(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        """See `FusedCodec.encode_residual`."""
        if flat.numel():
            self.encode_pieces(flat, residual, new_residual, payload.unsqueeze(0), flat.numel())

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """See `FusedCodec.decode_reduce`."""
        if flat.numel():
            KERNELS_ON[flat.device.type].decode_reduce(self, payloads, addend, flat)

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """See `PieceCodec.encode_pieces`."""
        KERNELS_ON[flat.device.type].encode_pieces(self, flat, residual, new_residual, payloads, width)

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """See `PieceCodec.decode_pieces`."""
        KERNELS_ON[flat.device.type].decode_pieces(self, payloads, flat, width)

    def reduce_encode(
        self, payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
    ) -> None:
        """See `PieceCodec.reduce_encode`."""
        if numel:
            KERNELS_ON[payloads.device.type].reduce_encode(self, payloads, residual, new_residual, reduced, numel)
