"""A shard in pieces, one for each owner, each with a payload of its own: one piece after the other.

The CUDA kernels do the same in one launch.
"""

from collections.abc import Callable

from torch import Tensor

Encode = Callable[[Tensor, Tensor | None, Tensor | None, Tensor], None]
"""Encodes one piece: (gradient, residual, new_residual, payload)."""
Decode = Callable[[Tensor, Tensor], None]
"""Decodes one piece: (payload, target)."""


def encode_each(
    encode: Encode,
    wire_nbytes: Callable[[int], int],
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """Encodes each run of `width` elements, of which the last may be shorter, into its row of `payloads`.

    Args:
        encode: Encodes one piece.
        wire_nbytes: Elements -> bytes of their payload.
        gradient: 1-D float32.
        residual: Of the same numel, or None.
        new_residual: Of the same numel, overwritten; or None.
        payloads: (pieces, at least wire_nbytes(width)) uint8; each row is overwritten up to its payload's own size.
        width: Elements of a piece, at least 1 where there are any.
    """
    if not gradient.numel():
        return
    for start, row in zip(range(0, gradient.numel(), width), payloads, strict=False):
        run = slice(start, start + width)
        piece = gradient[run]
        encode(
            piece,
            None if residual is None else residual[run],
            None if new_residual is None else new_residual[run],
            row[: wire_nbytes(piece.numel())],
        )


def decode_each(
    decode: Decode, wire_nbytes: Callable[[int], int], payloads: Tensor, target: Tensor, width: int
) -> None:
    """The inverse of `encode_each`: decodes each row of `payloads` into its run of `width` elements of `target`.

    Args:
        decode: Decodes one piece.
        wire_nbytes: Elements -> bytes of their payload.
        payloads: (pieces, at least wire_nbytes(width)) uint8; what is behind a shorter payload is not read.
        target: 1-D float32, overwritten.
        width: Elements of a piece, at least 1 where there are any.
    """
    if not target.numel():
        return
    for start, row in zip(range(0, target.numel(), width), payloads, strict=False):
        piece = target[start : start + width]
        decode(row[: wire_nbytes(piece.numel())], piece)
