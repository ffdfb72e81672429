"""One bit an element: signs, and the mean magnitude of each block."""

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.compressors.kernels.reference.pieces import decode_each, encode_each

ONEBIT_BLOCK = 1024
"""Elements that share a scale: small enough to follow a layer's scale, large enough that 4 bytes cost 3 %."""


@lru_cache(maxsize=1024)
def onebit_nbytes(numel: int) -> int:
    """Returns the bytes of a payload of `numel` elements: a float32 scale for each block, a bit for each element."""
    return -(-numel // ONEBIT_BLOCK) * 4 + -(-numel // 8)


def _onebit_scales(p: Tensor) -> Tensor:
    """Returns each block's mean magnitude, summed in a fixed order: 64 running sums, then a tree of halves."""
    blocks = -(-p.numel() // ONEBIT_BLOCK)
    padded = torch.zeros(blocks * ONEBIT_BLOCK, device=p.device)
    padded[: p.numel()] = p.abs()
    sums = torch.zeros(blocks, 64, device=p.device)
    for row in padded.view(blocks, -1, 64).unbind(1):
        sums = sums + row
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    counts = torch.full((blocks,), float(ONEBIT_BLOCK), device=p.device)
    counts[-1:] = p.numel() - (blocks - 1) * ONEBIT_BLOCK
    return sums.view(-1) / counts


def _magnitudes(scales: Tensor, numel: int) -> Tensor:
    """Returns the scale of each element's block."""
    return scales.repeat_interleave(ONEBIT_BLOCK)[:numel]


def onebit_encode(gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor) -> None:
    """Writes the signs (1 where p >= 0) and block scales of p = gradient + residual into `payload`.

    Args:
        gradient: What to send.
        residual: What earlier payloads left out, or None.
        new_residual: Receives p - decode(payload); or None.
        payload: (onebit_nbytes(numel)) uint8, overwritten: the float32 scales of the blocks, then the signs, the lowest
            bit first.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4: scale = L1 norm / n.
    """
    p = gradient if residual is None else gradient + residual
    scales = _onebit_scales(p)
    signs = p >= 0
    weights = (2 ** torch.arange(8, device=p.device)).to(torch.uint8)
    padded = torch.zeros(-(-p.numel() // 8) * 8, dtype=torch.uint8, device=p.device)
    padded[: p.numel()] = signs
    payload.copy_(torch.cat([scales.view(torch.uint8), (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)]))
    if new_residual is not None:
        magnitudes = _magnitudes(scales, p.numel())
        torch.sub(p, torch.where(signs, magnitudes, -magnitudes), out=new_residual)


def onebit_encode_pieces(
    gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """Encodes each run of `width` elements into its row of `payloads`, as onebit_encode does.

    Args:
        gradient: What to send.
        residual: What earlier payloads left out, or None.
        new_residual: Receives what the payloads leave out; or None.
        payloads: (pieces, at least onebit_nbytes(width)) uint8; each row is overwritten up to its payload's own size.
        width: Elements of a piece, at least 1 where there are any; the last piece may be shorter.
    """
    encode_each(onebit_encode, onebit_nbytes, gradient, residual, new_residual, payloads, width)


def _onebit_decode(payload: Tensor, numel: int) -> Tensor:
    blocks = -(-numel // ONEBIT_BLOCK)
    scales = payload[: 4 * blocks].clone().view(torch.float32)
    bits = payload[4 * blocks : 4 * blocks + -(-numel // 8)]
    signs = (bits.unsqueeze(1) >> torch.arange(8, device=payload.device) & 1).view(-1)[:numel].bool()
    magnitudes = _magnitudes(scales, numel)
    return torch.where(signs, magnitudes, -magnitudes)


def onebit_decode_reduce(payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `target`.

    Args:
        payloads: (workers, at least onebit_nbytes(numel)) uint8.
        addend: What the sum starts from, or None.
        target: Overwritten with the sum.
    """
    total = torch.zeros_like(target) if addend is None else addend.clone()
    for payload in payloads:
        total += _onebit_decode(payload, target.numel())
    target.copy_(total)


def onebit_decode_pieces(payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements: the inverse of onebit_encode_pieces.

    Args:
        payloads: (pieces, at least onebit_nbytes(width)) uint8.
        target: Overwritten.
        width: Elements of a piece, at least 1 where there are any.
    """
    decode_each(lambda row, piece: onebit_decode_reduce(row[None], None, piece), onebit_nbytes, payloads, target, width)


def onebit_reduce_encode(
    payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
) -> None:
    """The owner's stage of the two-stage exchange: decodes and sums all payloads, and encodes the sum again.

    Args:
        payloads: (workers, at least onebit_nbytes(numel)) uint8: what the workers sent.
        residual: (numel) float32, what the owner's reduced payloads left out so far; or None.
        new_residual: (numel) float32, receives what `reduced` leaves out; or None.
        reduced: (onebit_nbytes(numel)) uint8, overwritten with the payload of the sum plus the residual.
        numel: Elements of the owner's part.

    Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
    """
    total = torch.empty(numel, device=payloads.device)
    onebit_decode_reduce(payloads, None, total)
    onebit_encode(total, residual, new_residual, reduced)
