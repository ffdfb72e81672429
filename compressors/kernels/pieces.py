"""A shard in pieces, one for each owner, each with a payload of its own: what CUDA does in one launch, one by one."""

from collections.abc import Callable

from torch import Tensor

Encode = Callable[[Tensor, Tensor | None, Tensor | None, Tensor], None]
"""Of one piece: gradient, residual, what is left out, payload."""
Decode = Callable[[Tensor, Tensor], None]
"""Of one piece: payload, target."""


def encode_each(
    encode: Encode,
    wire_nbytes: Callable[[int], int],
    gradient: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """Encodes each run of `width` elements, of which the last may be shorter, into its row of `payloads`.

    Args:
        encode: Encodes one piece.
        wire_nbytes: Size of the payload of so many elements.
        gradient: 1-D float32.
        residual: As long, or None.
        left: As long, or None; written.
        payloads: (pieces, at least wire_nbytes(width)) uint8; written up to each payload's own size.
        width: Elements of a piece.
    """
    for start, row in zip(range(0, gradient.numel(), width), payloads, strict=False):
        run = slice(start, start + width)
        piece = gradient[run]
        encode(
            piece,
            None if residual is None else residual[run],
            None if left is None else left[run],
            row[: wire_nbytes(piece.numel())],
        )


def decode_each(
    decode: Decode, wire_nbytes: Callable[[int], int], payloads: Tensor, target: Tensor, width: int
) -> None:
    """The inverse of `encode_each`: fills each run of `width` elements of `target` from its row of `payloads`."""
    for start, row in zip(range(0, target.numel(), width), payloads, strict=False):
        piece = target[start : start + width]
        decode(row[: wire_nbytes(piece.numel())], piece)
