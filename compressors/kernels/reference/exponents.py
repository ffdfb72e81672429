"""bfloat16 values with their exponents in a variable-length code: the same values from fewer bytes, bit for bit.

A payload of n values in blocks of 64, all of it little-endian:

    32 bytes  eight uint32: blocks that are not all zero, bits of each of the planes 1 to 6, number of escapes
    n / 64    a byte for each block: its largest exponent, at least 1; 0 where all 64 values are +0, and nothing follows
    80 each   for each other block: 64 bytes of sign and mantissa, 8 bytes of low bits, 8 bytes of plane 0
    planes    1 to 6, each from a byte of its own on, the lowest bit first
    escapes   a byte each, the whole exponent

A value's exponent becomes a symbol, by how far it lies below the largest of its block, in the order of how frequent
that is where a block's values are normally distributed: 1, 2, 3, 4, 0, 5 below it, zero (and what is below the normal
numbers), 6, 7, ... 13 below, and the escape. Symbol s goes as its low bit and s >> 1 in unary (Rice's code): plane j
says of each value with s >> 1 >= j whether that is more than j. Two symbols each take 2, 3, ... 8 bits.

Plane by plane, and not value by value, all of it is comparing, counting, and compressing masks of 64 bits. Where all
that would not be shorter, the values themselves follow the header, whose first number is then `RAW`.

Source: Rice and Plaunt, Adaptive variable-length coding, IEEE Trans. Commun. 19(6), 1971. The order of the symbols:
Huffman's lengths for gradients of both convergence tasks (docs/results/number_formats.md) are those of this code, but
for one of the rarest symbols.
"""

import torch
from torch import Tensor

EXPONENTS_BLOCK = 64
"""Values that share the largest exponent: the bits of a machine word."""
HEADER_NBYTES = 32
"""Bytes of the header, eight uint32."""
BLOCK_NBYTES = 80
"""Bytes of a block that is not all zero, but for what the planes take."""
PLANES = 7
"""Unary digits at most; the first goes with its block."""
RAW = 0xFFFFFFFF
"""Mark in place of the number of blocks: the values follow as they are."""
SYMBOLS = (4, 0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14)
"""Symbols of exponents that lie 0, 1, 2, ... below the largest of their block; further below is `ESCAPE`."""
ZERO, ESCAPE = 6, 15
"""Symbols of the exponent 0, and of one that follows whole."""


def exponents_most_nbytes(numel: int) -> int:
    """Returns the bytes that a payload of `numel` values, a multiple of 64, has at most."""
    return HEADER_NBYTES + 2 * numel


def exponents_header(payload: Tensor) -> list[int]:
    """Returns the eight numbers at the beginning of a payload, 1-D uint8; on CUDA the host waits for them."""
    data = bytes(payload[:HEADER_NBYTES].tolist())
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, HEADER_NBYTES, 4)]


def exponents_nbytes(payload: Tensor, numel: int) -> int:
    """Returns how long a payload says that it is.

    Args:
        payload: 1-D uint8, its header at least.
        numel: Values in it, a multiple of 64.
    """
    blocks, *bits, escapes = exponents_header(payload)
    if blocks == RAW:
        return exponents_most_nbytes(numel)
    planes = sum((each + 7) // 8 for each in bits)
    return HEADER_NBYTES + numel // EXPONENTS_BLOCK + BLOCK_NBYTES * blocks + planes + escapes


def exponents_pack(blocks: Tensor, payload: Tensor) -> int:
    """Writes values into a payload.

    Args:
        blocks: (n / 64, 64) bfloat16, n >= 64; rows may be apart.
        payload: 1-D uint8, at least exponents_most_nbytes(n) long; what lies behind the payload may be overwritten too.

    Returns:
        The payload's length in bytes.
    """
    most = exponents_most_nbytes(blocks.numel())
    bits = blocks.contiguous().view(torch.int16).int() & 0xFFFF
    exponents = bits >> 7 & 0xFF
    largest = torch.where(bits.any(1), exponents.amax(1).clamp(min=1), 0)
    kept = largest > 0
    below = (largest[:, None] - exponents)[kept]
    known = torch.tensor([*SYMBOLS, ESCAPE], dtype=torch.int32, device=blocks.device)
    symbols = torch.where(exponents[kept] == 0, ZERO, known[below.clamp(max=len(SYMBOLS))])
    fixed = torch.cat(
        [
            (bits[kept] >> 8 & 0x80 | bits[kept] & 0x7F).to(torch.uint8),
            _bytes_of(symbols & 1).view(-1, 8),
            _bytes_of(symbols >> 1 > 0).view(-1, 8),
        ],
        1,
    )
    unary = (symbols >> 1).view(-1)
    planes = [(unary > plane)[unary >= plane] for plane in range(1, PLANES)]
    escapes = exponents[kept][symbols == ESCAPE]
    counts = [int(kept.sum()), *(len(plane) for plane in planes), len(escapes)]
    header = torch.tensor(counts, dtype=torch.int64, device=blocks.device)
    parts = [
        torch.stack([header >> shift & 0xFF for shift in (0, 8, 16, 24)], 1).view(-1),
        largest,
        fixed.view(-1),
        *(_bytes_of(plane) for plane in planes),
        escapes,
    ]
    packed = torch.cat([part.to(torch.uint8) for part in parts])
    if packed.numel() >= most:
        payload[:4] = 0xFF
        payload[4:HEADER_NBYTES] = 0
        payload[HEADER_NBYTES:most] = blocks.contiguous().view(-1).view(torch.uint8)
        return most
    payload[: packed.numel()] = packed
    return packed.numel()


def exponents_unpack(payload: Tensor, blocks: Tensor) -> None:
    """Reads values back.

    Args:
        payload: 1-D uint8, as exponents_pack wrote it; may be longer.
        blocks: (n / 64, 64) bfloat16, n >= 64, overwritten; rows may be apart.

    Raises:
        ValueError: The payload is shorter than it says, or contradicts itself.
    """
    numel = blocks.numel()
    if payload.numel() < HEADER_NBYTES or payload.numel() < exponents_nbytes(payload, numel):
        raise ValueError(f"`payload` has {payload.numel()} bytes, fewer than its header says: it is damaged")
    count, *plane_bits, escaped = exponents_header(payload)
    if count == RAW:
        blocks.copy_(payload[HEADER_NBYTES : exponents_most_nbytes(numel)].clone().view(torch.bfloat16).view_as(blocks))
        return
    at = HEADER_NBYTES + len(blocks)
    largest = payload[HEADER_NBYTES:at].int()
    kept = largest > 0
    _expect(int(kept.sum()), count)
    fixed = payload[at : at + BLOCK_NBYTES * count].view(count, BLOCK_NBYTES)
    at += BLOCK_NBYTES * count
    low, unary = _bits_of(fixed[:, 64:72]).int(), _bits_of(fixed[:, 72:80]).int()
    more = unary.bool()
    for plane, length in enumerate(plane_bits, 1):
        _expect(int(more.sum()), length)
        nbytes = (length + 7) // 8
        digits = _bits_of(payload[at : at + nbytes])[:length]
        more = more.masked_scatter(more, digits)
        unary[more] = plane + 1
        at += nbytes
    symbols = (2 * unary + low).view(count, EXPONENTS_BLOCK)
    distance = torch.zeros(ESCAPE + 1, dtype=torch.int32, device=blocks.device)
    for below, symbol in enumerate(SYMBOLS):
        distance[symbol] = below
    exponents = torch.where(symbols == ZERO, 0, largest[kept][:, None] - distance[symbols.long()])
    _expect(int((symbols == ESCAPE).sum()), escaped)
    exponents = exponents.masked_scatter(symbols == ESCAPE, payload[at : at + escaped].int())
    rest = fixed[:, :EXPONENTS_BLOCK].int()
    bits = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    bits[kept] = (rest & 0x80) << 8 | (exponents & 0xFF) << 7 | rest & 0x7F
    blocks.copy_(torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16))


def _expect(found: int, said: int) -> None:
    if found != said:
        raise ValueError("`payload` contradicts its header: it is damaged")


def _bytes_of(bits: Tensor) -> Tensor:
    """Packs 0 and 1 into bytes, the lowest bit first; the last byte is filled up with zeros."""
    flat = torch.nn.functional.pad(bits.reshape(-1).int(), (0, -bits.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=bits.device)
    return (flat * weights).sum(1).to(torch.uint8)


def _bits_of(data: Tensor) -> Tensor:
    """The inverse of `_bytes_of`, as bool; all of `data`, flat."""
    shifts = torch.arange(8, dtype=torch.int32, device=data.device)
    return (data.reshape(-1, 1).int() >> shifts & 1).view(-1).bool()
