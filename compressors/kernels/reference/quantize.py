"""8 or 4 bits an element, between the smallest and the largest of each block."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from gradwire.compressors.kernels.hashing import hash_uniforms
from gradwire.compressors.kernels.reference.pieces import decode_each, encode_each

QUANTIZE_BLOCK = 512
"""Elements that share a range. Source: Alistarh et al., QSGD, NeurIPS 2017, section 5 (buckets of 512 for 4 bits)."""
_SMALLEST_NORMAL = 2.0**-126
"""Of float32: below it 1 / unit is inf, so such a range counts as empty. Source: IEEE 754-2019, binary32."""


@lru_cache(maxsize=1024)
def quantize_nbytes(numel: int, bits: int) -> int:
    """Returns the bytes of a payload of `numel` elements: two float32 for each block, and `bits` for each element."""
    return -(-numel // QUANTIZE_BLOCK) * 8 + -(-numel * bits // 8)


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """Rounds p = gradient + residual to 2^bits levels between the smallest and largest element of each block of 512.

    Args:
        bits: 4 or 8.
        gradient: What to send.
        residual: What earlier payloads left out, or None.
        new_residual: Receives p - decode(payload); or None.
        payload: (quantize_nbytes(numel, bits)) uint8, overwritten: (unit, low) in float32 for each block, then the
            codes; of two 4-bit codes in a byte the even element's is the lower. An element decodes to low + code *
            unit.
        key: 32 bits: rounds at random, without bias, by a hash of this key and the element's index. None rounds to
            nearest.

    Source: Alistarh et al., QSGD, NeurIPS 2017, section 4 (blocks, random rounding).
    """
    p = gradient if residual is None else gradient + residual
    levels, numel = float(2**bits - 1), p.numel()
    blocks = -(-numel // QUANTIZE_BLOCK)
    last = p[(blocks - 1) * QUANTIZE_BLOCK]
    rows = torch.cat([p, last.expand(blocks * QUANTIZE_BLOCK - numel)]).view(blocks, -1)
    low, high = rows.amin(1) + 0.0, rows.amax(1)
    spread = high - low
    unit = torch.where(spread.isfinite(), spread / levels, high / levels - low / levels)
    unit = torch.where(unit < _SMALLEST_NORMAL, 0.0, unit)
    inverse = torch.where(unit > 0, 1.0 / unit, 0.0)
    offsets = torch.tensor(0.5) if key is None else hash_uniforms(key, rows.numel(), p.device).view_as(rows)
    codes = ((rows - low[:, None]) * inverse[:, None] + offsets).clamp(max=levels)
    finite = rows.isfinite().all(1)
    codes = torch.where(finite[:, None], codes, 0.0).to(torch.uint8)
    nan = torch.tensor(torch.nan, device=p.device)
    unit, low = torch.where(finite, unit, nan), torch.where(finite, low, nan)
    if new_residual is not None:
        decoded = low[:, None] + codes.float() * unit[:, None]
        torch.sub(p, decoded.view(-1)[:numel], out=new_residual)
    flat = codes.view(-1)[:numel]
    if bits == 4:
        flat = torch.cat([flat, flat.new_zeros(numel % 2)])
        flat = flat[0::2] | flat[1::2] << 4
    payload.copy_(torch.cat([torch.stack([unit, low], 1).view(-1).view(torch.uint8), flat]))


def quantize_encode_pieces(
    bits: int,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
    key: int | None,
) -> None:
    """Encodes each run of `width` elements into its row of `payloads`, as quantize_encode does.

    Args:
        bits: 4 or 8.
        gradient: What to send.
        residual: What earlier payloads left out, or None.
        new_residual: Receives what the payloads leave out; or None.
        payloads: (pieces, at least quantize_nbytes(width, bits)) uint8; each row is overwritten up to its payload's own
            size.
        width: Elements of a piece, at least 1 where there are any; the last piece may be shorter.
        key: As in quantize_encode; an element's random number depends on its index in the piece.
    """
    encode_each(
        partial(quantize_encode, bits, key=key),
        partial(quantize_nbytes, bits=bits),
        gradient,
        residual,
        new_residual,
        payloads,
        width,
    )


def _quantize_decode(bits: int, payload: Tensor, numel: int) -> Tensor:
    blocks = -(-numel // QUANTIZE_BLOCK)
    unit, low = payload[: 8 * blocks].clone().view(torch.float32).view(blocks, 2).unbind(1)
    codes = payload[8 * blocks : 8 * blocks + -(-numel * bits // 8)]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel]
    low, unit = (number.repeat_interleave(QUANTIZE_BLOCK)[:numel] for number in (low, unit))  # of each element's block
    return low + codes.float() * unit


def quantize_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ..., in this order, into `target`.

    Args:
        bits: 4 or 8.
        payloads: (workers, at least quantize_nbytes(numel, bits)) uint8.
        addend: What the sum starts from, or None.
        target: Overwritten with the sum.
    """
    total = torch.zeros_like(target) if addend is None else addend.clone()
    for payload in payloads:
        total += _quantize_decode(bits, payload, target.numel())
    target.copy_(total)


def quantize_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements: the inverse of quantize_encode_pieces.

    Args:
        bits: 4 or 8.
        payloads: (pieces, at least quantize_nbytes(width, bits)) uint8.
        target: Overwritten.
        width: Elements of a piece, at least 1 where there are any.
    """
    decode_each(
        lambda row, piece: quantize_decode_reduce(bits, row[None], None, piece),
        partial(quantize_nbytes, bits=bits),
        payloads,
        target,
        width,
    )


def quantize_reduce_encode(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
    key: int | None,
) -> None:
    """The owner's stage of the two-stage exchange: decodes and sums all payloads, and encodes the sum again.

    Args:
        bits: 4 or 8.
        payloads: (workers, at least quantize_nbytes(numel, bits)) uint8: what the workers sent.
        residual: (numel) float32, what the owner's reduced payloads left out so far; or None.
        new_residual: (numel) float32, receives what `reduced` leaves out; or None.
        reduced: (quantize_nbytes(numel, bits)) uint8, overwritten with the payload of the sum plus the residual.
        numel: Elements of the owner's part.
        key: As in quantize_encode.

    Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
    """
    total = torch.empty(numel, device=payloads.device)
    quantize_decode_reduce(bits, payloads, None, total)
    quantize_encode(bits, total, residual, new_residual, reduced, key)
