"""Number formats for sending gradients, with their error and the bits that they take, for choosing a codec.

Formats that gradwire sends are its own codecs; the others are references in a few lines of torch, and exist only here.
The size of each depends on the number of elements only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from gradwire.compressors.base import Codec
from gradwire.compressors.registry import make, names
from gradwire.compressors.two_stage import TwoStage

MX_BLOCK = 32
"""Elements that share a scale of 8 bits. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5."""
FILLED = ((32, 4096), (16, 16384), (64, 16384), (32, 65536))
"""(elements of a block, elements among which `filled` shares out its bits) beside `waterfill`'s 32 and 16,384."""
MOST_BITS = 8
"""Upper limit of the bits of an element in `filled`."""


@dataclass(frozen=True, slots=True)
class Format:
    """Number format for gradients, a row of the table."""

    name: str
    bits: Callable[[int], float]
    """Function from a gradient's number of elements to the bits of an element, scales included."""
    approximate: Callable[[Tensor], Tensor]
    """Function from a 1-D float32 gradient to what is left of it after encoding and decoding."""


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A small floating-point format without infinities, as in the MX specification, section 5.3.

    Attributes:
        exponent_bits: Bits of the exponent.
        mantissa_bits: Bits of the mantissa, without the implied one.
        largest: Largest value.
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def bits(self) -> int:
        """Bits of a value: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def round(self, x: Tensor) -> Tensor:
        """Returns the nearest values of the format in float32, ties to even; larger ones than `largest` become that.

        Args:
            x: float32 of any shape.
        """
        smallest = 2 - 2 ** (self.exponent_bits - 1)  # exponent of the smallest normal number
        exponent = (torch.frexp(x).exponent - 1).clamp(min=smallest)
        step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa_bits)
        return (torch.round(x / step) * step).clamp(-self.largest, self.largest)


E4M3, E5M2 = Minifloat(4, 3, 448.0), Minifloat(5, 2, 57344.0)
E3M2, E2M3, E2M1 = Minifloat(3, 2, 28.0), Minifloat(2, 3, 7.5), Minifloat(2, 1, 6.0)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Cuts a 1-D tensor into blocks of `size` elements, padded with zeros: (blocks, size)."""
    return torch.cat([x, x.new_zeros(-x.numel() % size)]).view(-1, size)


def _flat(blocks: Tensor, numel: int) -> Tensor:
    return blocks.reshape(-1)[:numel]


def _power_of_two_floor(x: Tensor) -> Tensor:
    """Returns the largest power of two that is at most x; 1 where x is 0."""
    return torch.where(x > 0, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1), 1.0)


def mx(element: Minifloat, x: Tensor) -> Tensor:
    """Rounds a gradient to MX: small floats with a power of two as the scale of each 32 values.

    Args:
        element: Format of the small floats.
        x: Gradient, 1-D float32.

    Source: OCP MX Specification 1.0, section 6.3.
    """
    blocks = _blocks(x, MX_BLOCK)
    scale = _power_of_two_floor(blocks.abs().amax(1, keepdim=True)) / _power_of_two_floor(torch.tensor(element.largest))
    return _flat(element.round(blocks / scale) * scale, x.numel())


def mxint8(x: Tensor) -> Tensor:
    """Rounds a gradient to MXINT8: fixed-point values of at most 127/64, with a power of two for each 32 of them."""
    blocks = _blocks(x, MX_BLOCK)
    scale = _power_of_two_floor(blocks.abs().amax(1, keepdim=True))
    return _flat((blocks / scale * 64).round().clamp(-127, 127) / 64 * scale, x.numel())


def fp8(element: Minifloat, block: int, x: Tensor) -> Tensor:
    """Rounds a gradient to small floats with a float32 scale for each block, set by its largest value."""
    blocks = _blocks(x, block)
    most = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(most > 0, most / element.largest, 1.0)
    return _flat(element.round(blocks / scale) * scale, x.numel())


def nvfp4(x: Tensor) -> Tensor:
    """Rounds a gradient to NVFP4: E2M1 with an E4M3 scale for each 16 values and a float32 scale for all.

    Source: NVIDIA, NVFP4, 2025.
    """
    blocks = _blocks(x, 16)
    most = blocks.abs().amax(1, keepdim=True)
    whole = float(most.max()) / (E2M1.largest * E4M3.largest) or 1.0
    scale = E4M3.round(most / E2M1.largest / whole) * whole
    return _flat(E2M1.round(blocks / torch.where(scale > 0, scale, 1.0)) * scale, x.numel())


def uniform(bits: int, block: int, x: Tensor) -> Tensor:
    """Rounds a gradient to 2^bits - 1 even steps around zero, up to each block's largest magnitude, a bfloat16."""
    blocks, levels = _blocks(x, block), 2 ** (bits - 1) - 1
    most = blocks.abs().amax(1, keepdim=True).bfloat16().float()
    unit = torch.where(most > 0, most / levels, 1.0)
    return _flat((blocks / unit).round().clamp(-levels, levels) * unit, x.numel())


@lru_cache(maxsize=16)
def gaussian_levels(bits: int) -> Tensor:
    """Returns the 2^bits levels of least squared error for a normal variable of deviation 1, ascending.

    Source: Lloyd, IEEE Trans. Inf. Theory 28(2), 1982; Max, IRE Trans. Inf. Theory 6(1), 1960 (tables).
    """
    count = 2**bits  # starts where the levels of many bits lie: a third of the density's exponent
    levels = math.sqrt(6) * torch.erfinv((2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1)
    ends = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(4000):  # each level moves to its cell's mean: phi(a) - phi(b) over Phi(b) - Phi(a)
        edges = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = torch.erf(edges / math.sqrt(2)) / 2
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.float()


def _nearest(x: Tensor, levels: Tensor) -> Tensor:
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def gaussian(bits: int, block: int, x: Tensor) -> Tensor:
    """Rounds a gradient to `gaussian_levels`, scaled by the root mean square of each block, which is a bfloat16."""
    blocks = _blocks(x, block)
    scale = blocks.square().mean(1, keepdim=True).sqrt().bfloat16().float()
    return _flat(_nearest(blocks / torch.where(scale > 0, scale, 1.0), gaussian_levels(bits)) * scale, x.numel())


def hadamard(blocks: Tensor) -> Tensor:
    """Returns each row's Walsh-Hadamard transform over the root of its length, a power of two: its own inverse."""
    rows, length = blocks.shape
    width = 1
    while width < length:
        pairs = blocks.view(rows, -1, 2, width)
        blocks = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(rows, length)
        width *= 2
    return blocks / math.sqrt(length)


def rotated(bits: int, block: int, x: Tensor) -> Tensor:
    """Rounds a gradient by `gaussian` after random signs and a rotation, which make any block's values nearly normal.

    Source: Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017, section 4.
    """
    signs = torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
    turned = hadamard(_blocks(x, block) * signs)
    back = hadamard(gaussian(bits, block, turned.reshape(-1)).view(-1, block)) * signs
    return _flat(back, x.numel())


def fill(scales: Tensor, increments: int) -> Tensor:
    """Divides bits among blocks: each bit goes to the block whose error it reduces most.

    One more bit for each value of a block divides the block's squared error by four, so a block whose values are twice
    as large gets one bit more. Sender and receiver compute the same from the same scales; of equal blocks the first is
    preferred.

    Args:
        scales: Scale of each block, float32 of shape (groups, blocks), each a power of 2^(1/8) or 0.
        increments: Sum of the bits a value of all blocks in a group.

    Returns:
        (groups, blocks) int64: each block's bits a value, 0 to `MOST_BITS`; each row's sum is `increments`.

    Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
    """
    eighths = torch.where(scales > 0, torch.log2(scales) * 8, -1e4).round()
    gains = eighths.unsqueeze(2) - 8 * torch.arange(MOST_BITS, device=scales.device)
    order = torch.argsort(gains.transpose(1, 2).reshape(len(scales), -1), dim=1, descending=True, stable=True)
    chosen = torch.zeros(len(scales), gains.shape[1] * MOST_BITS, dtype=torch.int64, device=scales.device)
    chosen.scatter_(1, order[:, :increments], 1)
    return chosen.view(len(scales), MOST_BITS, -1).sum(1)


def filled(bits: int, block: int, group: int, x: Tensor) -> Tensor:
    """Rounds a gradient to even levels in each block, with the bits that `fill` gives it, `bits` a value on average.

    A block's scale is its largest magnitude, rounded up to a power of 2^(1/8), in 8 bits; a group has one float32.
    Scales that are more than 2^31 apart would not fit and count as zero.
    """
    numel, rows = x.numel(), _blocks(x, group)
    blocks = rows.view(len(rows), -1, block)
    most = blocks.abs().amax(2)
    scale = torch.where(most > 0, torch.exp2(torch.ceil(torch.log2(most) * 8) / 8), 0.0)
    scale = torch.where(scale * 2.0**31 >= scale.amax(1, keepdim=True), scale, 0.0)
    width = fill(scale, (bits * group - 8 * blocks.shape[1] - 32) // block).unsqueeze(2)
    cells = torch.ldexp(torch.ones_like(scale).unsqueeze(2), width)
    wide = torch.where(scale > 0, scale, 1.0).unsqueeze(2)
    code = ((blocks / wide + 1) / 2 * cells).floor().clamp(min=torch.zeros(()), max=cells - 1)
    return _flat(torch.where(width > 0, ((code + 0.5) / cells * 2 - 1) * scale.unsqueeze(2), 0.0), numel)


def through(codec: Codec, x: Tensor) -> Tensor:
    """Encodes a gradient with a codec and returns the decoded payload."""
    payload, arrived = torch.empty(codec.wire_nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, payload)
    codec.decode(payload, arrived)
    return arrived


def _codec(name: str, codec: Codec) -> Format:
    return Format(name, lambda numel: 8 * codec.wire_nbytes(numel) / numel, partial(through, codec))


def _fixed(name: str, bits: float, approximate: Callable[[Tensor], Tensor]) -> Format:
    return Format(name, lambda numel: bits, approximate)


def all_formats() -> list[Format]:
    """Returns every row of the table, widest first: all codecs by name, the user's too, and formats of others."""
    own = [made for name in names() if isinstance(made := make(name), TwoStage)]
    found = [
        *(_codec(made.name, made.codec) for made in own),
        _fixed("MXINT8", 8 + 8 / MX_BLOCK, mxint8),
        _fixed("NVFP4", 4 + 8 / 16, nvfp4),
    ]
    for name, element in (
        ("MXFP8 E4M3", E4M3),
        ("MXFP8 E5M2", E5M2),
        ("MXFP6 E3M2", E3M2),
        ("MXFP6 E2M3", E2M3),
        ("MXFP4 E2M1", E2M1),
    ):
        found.append(_fixed(name, element.bits + 8 / MX_BLOCK, partial(mx, element)))
    for name, element in (("fp8 E4M3, blocks of 128", E4M3), ("fp8 E5M2, blocks of 128", E5M2)):
        found.append(_fixed(name, 8 + 32 / 128, partial(fp8, element, 128)))
    for bits in (4, 5):
        for block in (32, 128):
            name = f"even levels, {bits} bits, blocks of {block}"
            found.append(_fixed(name, bits + 16 / block, partial(uniform, bits, block)))
        found.append(_fixed(f"normal levels, {bits} bits, blocks of 64", bits + 16 / 64, partial(gaussian, bits, 64)))
        found.append(_fixed(f"rotated, {bits} bits, blocks of 1024", bits + 16 / 1024, partial(rotated, bits, 1024)))
        for block, group in FILLED:
            name = f"bits shared out, {bits}, blocks of {block} in {group:,}"
            found.append(_fixed(name, bits, partial(filled, bits, block, group)))
    return sorted(found, key=lambda each: -each.bits(1 << 20))
