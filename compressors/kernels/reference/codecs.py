"""Every kernel in a few lines of torch: the oracle of the native kernels, the fall-back, and their documentation.

Each function has a twin of the same name and signature in compressors/kernels/native.py. `gradient`, `residual`, `left`,
`addend` and `target` are 1-D float32 of the same numel unless said otherwise, and `left` may be the same memory as
`residual`. `payloads` is 2-D uint8, one row a worker.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from gradwire.compressors.kernels.hashing import hash_uniforms
from gradwire.compressors.kernels.pieces import decode_each, encode_each
from gradwire.compressors.kernels.reference.dgc import dgc_step, dgc_step_many, scatter_add
from gradwire.compressors.kernels.reference.pack import pack, unpack
from gradwire.compressors.kernels.reference.powersgd import (
    orthogonalize,
    orthogonalize_many,
    powersgd_back_project,
    powersgd_project,
    powersgd_restore,
)

__all__ = [
    "ONEBIT_BLOCK",
    "QUANTIZE_BLOCK",
    "cast_decode_reduce",
    "cast_encode",
    "cast_serve",
    "dgc_step",
    "dgc_step_many",
    "onebit_decode_pieces",
    "onebit_decode_reduce",
    "onebit_encode",
    "onebit_encode_pieces",
    "onebit_nbytes",
    "onebit_serve",
    "orthogonalize",
    "orthogonalize_many",
    "pack",
    "powersgd_back_project",
    "powersgd_project",
    "powersgd_restore",
    "quantize_decode_pieces",
    "quantize_decode_reduce",
    "quantize_encode",
    "quantize_encode_pieces",
    "quantize_nbytes",
    "quantize_serve",
    "scatter_add",
    "unpack",
]

ONEBIT_BLOCK = 1024
"""Elements that share a 1-bit scale: small enough to follow a layer's scale, large enough that 4 bytes cost 3 %."""


def cast_encode(gradient: Tensor, scale: float, residual: Tensor | None, left: Tensor | None, target: Tensor) -> None:
    """Writes p = gradient * scale + residual, rounded to nearest even, into `target`; `left` becomes p - target.

    Args:
        gradient: What to send.
        scale: Factor applied in float32, before the cast, so that a mean that fits stays finite.
        residual: What was left out so far, or None.
        left: Receives the rounding error, or None.
        target: float16 or bfloat16; overflow becomes inf.
    """
    p = gradient * scale
    if residual is not None:
        p = p + residual
    target.copy_(p)
    if left is not None:
        torch.sub(p, target.float(), out=left)


def cast_decode_reduce(sources: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + sources[0] + sources[1] + ..., summed in float32, into `target`.

    Args:
        sources: 2-D float16 or bfloat16, one row a worker, at least as wide as `target`.
        addend: What to add, or None.
        target: Receives the sum.
    """
    rows = sources[:, : target.numel()].float()
    total = rows[0] if addend is None else addend + rows[0]
    if addend is None and len(rows) > 1:
        total = torch.zeros_like(total) + total
    for row in rows[1:]:
        total = total + row
    target.copy_(total)


def cast_serve(sources: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor) -> None:
    """The owner's stage: sums `sources` as cast_decode_reduce does, and encodes the sum plus `residual` again.

    Args:
        sources: 2-D float16 or bfloat16, one row a worker, at least as wide as `answer`.
        residual: The owner's own residual, or None.
        left: Receives what `answer` leaves out, or None.
        answer: Of the dtype of `sources`.
    """
    total = torch.empty(answer.numel(), device=answer.device)
    cast_decode_reduce(sources, None, total)
    cast_encode(total, 1.0, residual, left, answer)


@lru_cache(maxsize=1024)
def onebit_nbytes(numel: int) -> int:
    """Bytes of a 1-bit payload: a float32 scale for each block, and a bit for each element."""
    return -(-numel // ONEBIT_BLOCK) * 4 + -(-numel // 8)


def _onebit_scales(p: Tensor) -> Tensor:
    """Mean magnitude of each block of `p`, summed in one fixed order: 64 running sums, then a tree of halves."""
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


def _spread(scales: Tensor, numel: int, block: int) -> Tensor:
    """Repeats each block's number for each element of the block."""
    return scales.repeat_interleave(block)[:numel]


def onebit_encode(gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor) -> None:
    """Writes the signs (1 where p >= 0) and block scales of p = gradient + residual into `payload`.

    Args:
        gradient: What to send.
        residual: What was left out so far, or None.
        left: Receives p - decoded, or None.
        payload: uint8: float32 scales of the blocks, then signs, the lowest bit first.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, section 4: scale = L1 norm / n.
    """
    p = gradient if residual is None else gradient + residual
    scales = _onebit_scales(p)
    signs = p >= 0
    weights = (2 ** torch.arange(8, device=p.device)).to(torch.uint8)
    padded = torch.zeros(-(-p.numel() // 8) * 8, dtype=torch.uint8, device=p.device)
    padded[: p.numel()] = signs
    payload.copy_(torch.cat([scales.view(torch.uint8), (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)]))
    if left is not None:
        spread = _spread(scales, p.numel(), ONEBIT_BLOCK)
        torch.sub(p, torch.where(signs, spread, -spread), out=left)


def onebit_encode_pieces(
    gradient: Tensor, residual: Tensor | None, left: Tensor | None, payloads: Tensor, width: int
) -> None:
    """Encodes each run of `width` elements into its row of `payloads`; see pieces.encode_each."""
    encode_each(onebit_encode, onebit_nbytes, gradient, residual, left, payloads, width)


def _onebit_decode(payload: Tensor, numel: int) -> Tensor:
    blocks = -(-numel // ONEBIT_BLOCK)
    scales = payload[: 4 * blocks].clone().view(torch.float32)
    bits = payload[4 * blocks : 4 * blocks + -(-numel // 8)]
    signs = (bits.unsqueeze(1) >> torch.arange(8, device=payload.device) & 1).view(-1)[:numel].bool()
    spread = _spread(scales, numel, ONEBIT_BLOCK)
    return torch.where(signs, spread, -spread)


def onebit_decode_reduce(payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ... into `target`."""
    total = torch.zeros_like(target) if addend is None else addend.clone()
    for payload in payloads:
        total += _onebit_decode(payload, target.numel())
    target.copy_(total)


def onebit_decode_pieces(payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements; see pieces.decode_each."""
    decode_each(lambda row, piece: onebit_decode_reduce(row[None], None, piece), onebit_nbytes, payloads, target, width)


def onebit_serve(payloads: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor, numel: int) -> None:
    """The owner's stage of the two-stage exchange: decodes and sums all payloads, and encodes the sum again.

    Args:
        payloads: What the workers sent.
        residual: The owner's own residual (numel), or None.
        left: Receives what `answer` leaves out, or None.
        answer: uint8 payload of the sum plus the residual.
        numel: Elements of the owner's part.

    Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
    """
    total = torch.empty(numel, device=payloads.device)
    onebit_decode_reduce(payloads, None, total)
    onebit_encode(total, residual, left, answer)


QUANTIZE_BLOCK = 512
"""Elements that share a range. Source: Alistarh et al., QSGD, NeurIPS 2017, section 5 (buckets of 512 for 4 bits)."""
_SMALLEST_NORMAL = 2.0**-126


@lru_cache(maxsize=1024)
def quantize_nbytes(numel: int, bits: int) -> int:
    """Bytes of a payload of `bits` an element: (unit, low) in float32 for each block, and the codes."""
    return -(-numel // QUANTIZE_BLOCK) * 8 + -(-numel * bits // 8)


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """Rounds p = gradient + residual to 2^bits levels between the smallest and largest element of each block of 512.

    Args:
        bits: 4 or 8.
        gradient: What to send.
        residual: What was left out so far, or None.
        left: Receives p - decoded, or None.
        payload: uint8: (unit, low) in float32 for each block, then codes; the even element in a byte's low half.
        key: Rounds at random, without bias, by a hash of this key and the element's index; None rounds to nearest.
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
    if left is not None:
        decoded = low[:, None] + codes.float() * unit[:, None]
        torch.sub(p, decoded.view(-1)[:numel], out=left)
    flat = codes.view(-1)[:numel]
    if bits == 4:
        flat = torch.cat([flat, flat.new_zeros(numel % 2)])
        flat = flat[0::2] | flat[1::2] << 4
    payload.copy_(torch.cat([torch.stack([unit, low], 1).view(-1).view(torch.uint8), flat]))


def quantize_encode_pieces(
    bits: int,
    gradient: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    payloads: Tensor,
    width: int,
    key: int | None,
) -> None:
    """Encodes each run of `width` elements into its row of `payloads`; see pieces.encode_each.

    An element's random number depends on its index in the run.
    """
    encode_each(
        partial(quantize_encode, bits, key=key),
        partial(quantize_nbytes, bits=bits),
        gradient,
        residual,
        left,
        payloads,
        width,
    )


def _quantize_decode(bits: int, payload: Tensor, numel: int) -> Tensor:
    blocks = -(-numel // QUANTIZE_BLOCK)
    unit, low = payload[: 8 * blocks].clone().view(torch.float32).view(blocks, 2).unbind(1)
    codes = payload[8 * blocks : 8 * blocks + -(-numel * bits // 8)]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel]
    return _spread(low, numel, QUANTIZE_BLOCK) + codes.float() * _spread(unit, numel, QUANTIZE_BLOCK)


def quantize_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ... into `target`."""
    total = torch.zeros_like(target) if addend is None else addend.clone()
    for payload in payloads:
        total += _quantize_decode(bits, payload, target.numel())
    target.copy_(total)


def quantize_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements; see pieces.decode_each."""
    decode_each(
        lambda row, piece: quantize_decode_reduce(bits, row[None], None, piece),
        partial(quantize_nbytes, bits=bits),
        payloads,
        target,
        width,
    )


def quantize_serve(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    answer: Tensor,
    numel: int,
    key: int | None,
) -> None:
    """The owner's stage, as onebit_serve: sums the decoded `payloads` and encodes the sum plus `residual` again."""
    total = torch.empty(numel, device=payloads.device)
    quantize_decode_reduce(bits, payloads, None, total)
    quantize_encode(bits, total, residual, left, answer, key)
