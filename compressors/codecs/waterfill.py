"""waterfill5 to waterfill2: a few bits an element, more for blocks of large elements and fewer for small ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.two_stage import TwoStage

WATERFILL_GROUP = 16384
"""Elements among which the bits are shared out. A quarter of them leaves twice the error: see
docs/results/number_formats.md."""
WATERFILL_BLOCK = 32
"""Elements that share a scale and a code width: one bit of each makes a 32-bit word. The best of 16, 32 and 64 on the
same page."""
WATERFILL_BITS = (2, 3, 4, 5)
"""Mean bits per element for which there are kernels."""
MOST_WIDTH = 8
"""The widest code, in bits."""
_BLOCKS = WATERFILL_GROUP // WATERFILL_BLOCK
_LEAST_SCALE, _LARGEST_SCALE = 72, 0x7F7
"""A scale is the upper 12 bits of a float32: 2^-118, so that the step of the widest code is a normal number still, and
the largest finite one. 3 of the bits are mantissa: an octave has 8 scales."""
_NAN_SCALE = 0x7FC
"""Scale of a group with inf or NaN: the upper bits of NaN."""
_EMPTY = 255
"""Marks a block of zeros, or one whose scale is too far below the group's to be expressed: it gets no bits."""


def waterfill_words(blocks: int, bits: int) -> int:
    """Returns how many 32-bit words a group has for its codes: `bits` for each block, less the words of its scales.

    Args:
        blocks: Number of blocks of 32 elements in the group.
        bits: Mean bits per element.
    """
    return bits * blocks - (_BLOCKS // 4 + 1) * blocks // _BLOCKS


def _record_nbytes(numel: int, bits: int) -> int:
    """Returns the bytes of one encoded group: for its scale, for those of its blocks, and for the codes.

    Args:
        numel: Elements of the group, at most `WATERFILL_GROUP`.
        bits: Mean bits per element; a full group has exactly these, scales included.
    """
    blocks = -(-numel // WATERFILL_BLOCK)
    return 4 + -(-blocks // 4) * 4 + 4 * waterfill_words(blocks, bits)


def _runs(numel: int, bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first element, groups, elements of each group, first byte): full groups together, then a short one."""
    full, rest = divmod(numel, WATERFILL_GROUP)
    if full:
        yield 0, full, WATERFILL_GROUP, 0
    if rest:
        yield full * WATERFILL_GROUP, 1, rest, full * _record_nbytes(WATERFILL_GROUP, bits)


def waterfill_least(bits: int) -> int:
    """Returns the least code width of a block that is not empty.

    With width 0 the smallest blocks would not be sent before their residuals had grown for many steps.
    """
    return bits - 1


def _widths_at(below: Tensor, level: Tensor, least: int) -> Tensor:
    """Returns each block's bits per element at a water level: one more for each octave of the level above `below`."""
    widths = (((level - below) >> 3) + 1).clamp(least, MOST_WIDTH)
    return torch.where(below == _EMPTY, 0, widths)


def waterfill_widths(below: Tensor, words: int, least: int) -> Tensor:
    """Returns the code width of each block: distributes the words of each group over its blocks.

    One more bit quarters a block's squared error. So each next word goes to the block with the largest error, and a
    block of twice the scale gets one bit more. Of blocks with the same error the first ones come first. Sender and
    receiver compute the same widths, with integers.

    Args:
        below: (groups, blocks) int64: how many eighths of an octave each block's scale lies below its group's largest,
            0 to 254; 255 for none at all.
        words: Number of 32-bit words to distribute in each group; a block takes one for each bit of its code width.
        least: Least code width of a block that is not empty.

    Returns:
        (groups, blocks) int64, 0 to 8; a row's sum is `words`, or less if all blocks that are not empty have 8.

    Source: reverse water-filling: Cover and Thomas, Elements of Information Theory, section 10.3.3.
    """
    level = torch.full((len(below), 1), -1, dtype=torch.int64, device=below.device)
    for step in (256, 128, 64, 32, 16, 8, 4, 2, 1):  # the highest that takes fewer words than there are
        taken = _widths_at(below, level + step, least).sum(1, keepdim=True)
        level = torch.where((taken < words) & (level + step < _EMPTY + 8 * (MOST_WIDTH - 1)), level + step, level)
    widths = _widths_at(below, level, least)
    next_ones = _widths_at(below, level + 1, least) - widths
    left = words - widths.sum(1, keepdim=True)
    return widths + torch.where(next_ones.cumsum(1) <= left, next_ones, 0)


def _steps(scale: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (step, low) of each block: code c decodes to low + c * step; both are 0 for a block without bits."""
    step = ((scale << 20) - (widths << 23)).to(torch.int32).view(torch.float32)  # half a step: scale / 2^width
    step = torch.where(widths > 0, step, 0.0)
    return 2.0 * step, (1 - (1 << widths)).float() * step


def _encode_groups(p: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encodes groups of one length.

    Args:
        p: (groups, elements) float32.
        bits: Mean bits per element.

    Returns:
        The records (groups, bytes) uint8, and what they decode to, as p.
    """
    (groups, numel), blocks = p.shape, -(-p.shape[1] // WATERFILL_BLOCK)
    rows = torch.cat([p, p.new_zeros(groups, blocks * WATERFILL_BLOCK - numel)], 1).view(groups, blocks, -1)
    peaks = (rows.view(torch.int32) & 0x7FFFFFFF).amax(2).long()
    special = (peaks >= 0x7F800000).any(1, keepdim=True)
    scale = ((peaks + 0xFFFFF) >> 20).clamp(max=_LARGEST_SCALE)
    scale = torch.where((scale < _LEAST_SCALE) | special, 0, scale)
    base = scale.amax(1, keepdim=True)
    below = torch.where(scale == 0, _EMPTY, (base - scale).clamp(max=_EMPTY))
    words = waterfill_words(blocks, bits)
    widths = waterfill_widths(below, words, waterfill_least(bits))
    step, low = (each.unsqueeze(2) for each in _steps(scale, widths))
    cells = (1 << widths).float().unsqueeze(2)
    t = rows * torch.where(step > 0, 1.0 / step, 0.0) + 0.5 * cells
    codes = torch.minimum(t.clamp(min=0.0), cells - 1.0).trunc()
    decoded = (low + codes * step).view(groups, -1)[:, :numel]
    codes = torch.where(special.unsqueeze(2), 0.0, codes).long()
    places = torch.arange(WATERFILL_BLOCK, device=p.device)
    planes = torch.stack([((codes >> bit & 1) << places).sum(2) for bit in range(MOST_WIDTH)], 2)
    stream = torch.zeros(groups, words + MOST_WIDTH, dtype=torch.int64, device=p.device)
    at = (widths.cumsum(1) - widths).unsqueeze(2) + torch.arange(MOST_WIDTH, device=p.device)
    for bit in range(MOST_WIDTH):  # later blocks overwrite what is above an earlier one's width
        stream.scatter_add_(1, at[:, :, bit], torch.where(widths > bit, planes[:, :, bit], 0))
    head = torch.where(special, _NAN_SCALE, base).to(torch.int32)
    scales = torch.zeros(groups, -(-blocks // 4) * 4, dtype=torch.uint8, device=p.device)
    scales[:, :blocks] = torch.where(special, 0, below).to(torch.uint8)
    words_out = stream[:, :words].to(torch.int32).contiguous().view(torch.uint8).view(groups, -1)
    records = torch.cat([head.contiguous().view(torch.uint8).view(groups, -1), scales, words_out], 1)
    return records, torch.where(special, torch.nan, decoded)


def _decode_groups(records: Tensor, bits: int, numel: int) -> Tensor:
    """Returns the elements (groups, numel) float32 of the records of groups with `numel` elements."""
    groups, blocks = len(records), -(-numel // WATERFILL_BLOCK)
    head = 4 + -(-blocks // 4) * 4
    base = records[:, :4].reshape(-1).clone().view(torch.int32).view(-1, 1).long()
    below = records[:, 4 : 4 + blocks].long()
    stream = records[:, head:].reshape(-1).clone().view(torch.int32).view(groups, -1).long()
    stream = torch.cat([stream, stream.new_zeros(groups, MOST_WIDTH)], 1)
    widths = waterfill_widths(below, waterfill_words(blocks, bits), waterfill_least(bits))
    step, low = (each.unsqueeze(2) for each in _steps(base - below, widths))
    first = widths.cumsum(1) - widths
    places = torch.arange(WATERFILL_BLOCK, device=records.device)
    codes = torch.zeros(groups, blocks, WATERFILL_BLOCK, dtype=torch.int64, device=records.device)
    for bit in range(MOST_WIDTH):
        word = torch.where(widths > bit, stream.gather(1, first + bit), 0)
        codes |= (word.unsqueeze(2) >> places & 1) << bit
    decoded = (low + codes.float() * step).view(groups, -1)[:, :numel]
    return torch.where((base < 0) | (base > _LARGEST_SCALE), torch.nan, decoded)


@dataclass(frozen=True, slots=True)
class WaterfillCodec(BlockCodec):
    """Encodes with `bits` bits per element on average, scales included: large blocks of 32 elements get more of them.

    Blocks get codes of bits - 1 to 8 bits; see waterfill_widths. A block's scale is its largest magnitude, rounded up
    to one of eight steps in an octave; a code of w bits says in which of 2^w even cells from -scale to scale an element
    lies, and decodes to that cell's middle; a block of zeros has no bits, and decodes to zeros. 16,384 elements with
    inf or NaN among them decode to NaN.

    Raises:
        ValueError: `bits` is out of range.

    Source: bits as in reverse water-filling (Cover and Thomas, Elements of Information Theory, section 10.3.3); scales
    of blocks of 32 in 8 bits as in the OCP Microscaling Formats (MX) Specification 1.0.
    """

    bits: int
    """Mean bits per element, 2 to 5."""

    family: ClassVar[str] = "waterfill"

    def __post_init__(self) -> None:
        if self.bits not in WATERFILL_BITS:
            raise ValueError(f"`bits` is {self.bits}; wanted one of {', '.join(map(str, WATERFILL_BITS))}")

    @property
    def parameters(self) -> tuple[float, ...]:
        """(bits,): the argument of the kernels."""
        return (self.bits,)

    @lru_cache(maxsize=1024)  # noqa: B019 - codecs are values, and every step asks for the same lengths
    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes of a payload: exactly `bits` for each element in whole groups, scales included."""
        full, rest = divmod(numel, WATERFILL_GROUP)
        return full * _record_nbytes(WATERFILL_GROUP, self.bits) + (_record_nbytes(rest, self.bits) if rest else 0)

    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """Writes a record for each group of 16,384 elements, little-endian, and returns the decoded values.

        The upper 12 bits of its largest scale, as a float32, in a word of 32 bits, or those of NaN if it has an inf
        or a NaN; for each block a byte, how many eighths of an octave its scale lies below that, 255 for a block
        without bits, zeros up to whole words; the codes of one block after the other, a word for each bit, the lowest
        first, which has the first element's bit lowest; zeros up to waterfill_words.
        """
        decoded = torch.empty_like(p)
        for start, groups, numel, at in _runs(p.numel(), self.bits):
            run = slice(start, start + groups * numel)
            records, values = _encode_groups(p[run].view(groups, numel), self.bits)
            payload[at : at + records.numel()] = records.view(-1)
            decoded[run] = values.reshape(-1)
        return decoded

    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """Adds the decoded values of `payload` to `total`, in place, one group's record after the other."""
        for start, groups, numel, at in _runs(total.numel(), self.bits):
            nbytes = _record_nbytes(numel, self.bits)
            records = payload[at : at + groups * nbytes].view(groups, nbytes)
            total[start : start + groups * numel] += _decode_groups(records, self.bits, numel).reshape(-1)


class Waterfill(TwoStage):
    """The compressors "waterfill5", "waterfill4", "waterfill3" and "waterfill2".

    Args:
        name: "waterfill5" for 5 bits an element, and so on.
        residual: Whether the rounding error is added to the next step's gradient.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    def __init__(self, name: str, *, residual: bool = True, warmup_steps: int = 0) -> None:
        codec = WaterfillCodec(int(name.removeprefix("waterfill")))
        super().__init__(name, codec, residual=residual, warmup_steps=warmup_steps)
