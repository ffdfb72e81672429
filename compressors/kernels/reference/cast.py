"""float16 and bfloat16 payloads, summed in float32."""

import torch
from torch import Tensor


def cast_encode(
    gradient: Tensor, scale: float, residual: Tensor | None, new_residual: Tensor | None, target: Tensor
) -> None:
    """Writes p = gradient * scale + residual, rounded to nearest even, into `target`; `new_residual` is p - target.

    Args:
        gradient: What to send.
        scale: Factor applied in float32, before the cast, so that a mean that fits in the narrow dtype stays finite.
        residual: What earlier payloads left out, or None.
        new_residual: Receives the rounding error; or None.
        target: 1-D float16 or bfloat16 of the gradient's numel, overwritten; overflow becomes inf.

    Source: IEEE 754-2019, section 4.3.1 (round to nearest, ties to even).
    """
    p = gradient * scale
    if residual is not None:
        p = p + residual
    target.copy_(p)
    if new_residual is not None:
        torch.sub(p, target.float(), out=new_residual)


def cast_decode_reduce(sources: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + sources[0] + sources[1] + ..., summed in float32 in this order, into `target`.

    Args:
        sources: 2-D float16 or bfloat16, at least one row, one a worker; each at least as wide as `target`.
        addend: What the sum starts from, or None.
        target: Overwritten with the sum.
    """
    rows = sources[:, : target.numel()].float()
    total = rows[0] if addend is None else addend + rows[0]
    if addend is None and len(rows) > 1:
        total = torch.zeros_like(total) + total
    for row in rows[1:]:
        total = total + row
    target.copy_(total)


def cast_reduce_encode(sources: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor) -> None:
    """The owner's stage: sums `sources` as cast_decode_reduce does, and encodes the sum plus `residual` again.

    Args:
        sources: 2-D float16 or bfloat16, one row a worker, at least as wide as `reduced`.
        residual: The owner's own residual (reduced.numel()), or None.
        new_residual: Receives what `reduced` leaves out; or None.
        reduced: 1-D, of the dtype of `sources`, overwritten.
    """
    total = torch.empty(reduced.numel(), device=reduced.device)
    cast_decode_reduce(sources, None, total)
    cast_encode(total, 1.0, residual, new_residual, reduced)
