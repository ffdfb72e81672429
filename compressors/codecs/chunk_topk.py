"""The largest 64 of each 4,096 values at two bits each: for what is exchanged rarely, such as a pseudo-gradient."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.two_stage import TwoStage

_NAN_KEY = 0x7F800001
"""What the magnitude of every NaN counts as: more than any number, and the same whatever bits it has."""
_LANES = 32
"""Running sums of the kept magnitudes, then a tree of halves: the same order on every processor."""


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """What is kept of each chunk, and of the residual."""

    chunk: int = 4096
    """Elements of a chunk: a power of two from 256 to 4096."""
    keep: int = 64
    """How many of a full chunk are sent, 1 to min(chunk, 512)."""
    decay: float = 0.95
    """Factor of the residual before it is added to the gradient, 0 to 1."""

    def kept(self, numel: int) -> int:
        """How many are sent of a chunk that has `numel` elements: the same share, rounded up."""
        return -(-self.keep * numel // self.chunk)

    def record_nbytes(self, numel: int) -> int:
        """Bytes of a chunk that has `numel` elements."""
        return _layout(self, numel).nbytes


@dataclass(frozen=True, slots=True)
class _Layout:
    """The record of a chunk: two levels, an entry for each place, then the vector of the places' high parts."""

    kept: int
    low_bits: int
    """The low bits of a place that are in its entry."""
    entries_nbytes: int
    vector_nbytes: int

    @property
    def nbytes(self) -> int:
        return 4 + self.entries_nbytes + self.vector_nbytes


@lru_cache(maxsize=1024)
def _layout(rule: ChunkRule, numel: int) -> _Layout:
    """Returns the smallest record of `numel` elements; of two that are alike the one with more low bits."""
    kept = rule.kept(numel)
    layouts = [
        _Layout(kept, low, -(-(2 + low) * kept // 8), -(-(kept + (numel - kept >> low)) // 8))
        for low in range(rule.chunk.bit_length())
    ]
    return min(reversed(layouts), key=lambda layout: layout.nbytes)


@lru_cache(maxsize=1024)
def _nbytes(numel: int, rule: ChunkRule) -> int:
    """Returns the bytes of a payload of `numel` elements: a record for each chunk, of which the last may be shorter."""
    full, rest = divmod(numel, rule.chunk)
    return full * rule.record_nbytes(rule.chunk) + (rule.record_nbytes(rest) if rest else 0)


def _runs(numel: int, rule: ChunkRule) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first element, chunks, elements of each, first byte): the full chunks, then the short one."""
    full, rest = divmod(numel, rule.chunk)
    if full:
        yield 0, full, rule.chunk, 0
    if rest:
        yield full * rule.chunk, 1, rest, full * rule.record_nbytes(rule.chunk)


def _sum(x: Tensor) -> Tensor:
    """Returns the sum of each row in a fixed order: value i goes to running sum i % 32, then a tree of halves."""
    padded = torch.zeros(len(x), -(-x.shape[1] // _LANES) * _LANES, device=x.device)
    padded[:, : x.shape[1]] = x
    sums = torch.zeros(len(x), _LANES, device=x.device)
    for row in padded.view(len(x), -1, _LANES).unbind(1):
        sums = sums + row
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    return sums


def _bytes(bits: Tensor) -> Tensor:
    """Returns each row of bits in whole bytes (uint8), the lowest first."""
    padded = torch.zeros(len(bits), -(-bits.shape[1] // 8) * 8, dtype=torch.int64, device=bits.device)
    padded[:, : bits.shape[1]] = bits
    return (padded.view(len(bits), -1, 8) << torch.arange(8, device=bits.device)).sum(2).to(torch.uint8)


def _bits(stream: Tensor) -> Tensor:
    return (stream.unsqueeze(2) >> torch.arange(8, device=stream.device) & 1).view(len(stream), -1).long()


def _pack(places: Tensor, codes: Tensor, layout: _Layout) -> Tensor:
    """Returns (chunks, bytes) uint8: the entries, then the vector, of places in ascending order and their codes.

    Source: Elias, Efficient storage and retrieval by content and address of static files, JACM 21(2), 1974; Fano, On
        the number of bits required to implement an associative memory, MIT Project MAC memo 61, 1971; of place i - i,
        which never falls, because no place is there twice: without low bits the vector is a bitmap of the chunk.
    """
    order = torch.arange(layout.kept, device=places.device)
    gaps = places - order
    entries = codes + ((gaps & (1 << layout.low_bits) - 1) << 2)
    stream = entries.unsqueeze(2) >> torch.arange(2 + layout.low_bits, device=places.device) & 1
    vector = torch.zeros(len(places), 8 * layout.vector_nbytes, dtype=torch.int64, device=places.device)
    vector.scatter_(1, (gaps >> layout.low_bits) + order, 1)
    return torch.cat([_bytes(stream.view(len(places), -1)), _bytes(vector)], dim=1)


def _unpack(stream: Tensor, rule: ChunkRule, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Returns places and codes (chunks, kept) of what _pack wrote.

    Whatever the bytes hold, a place is one of the full chunk's, or `rule.chunk` where the vector has too few ones.
    """
    order, bits = torch.arange(layout.kept, device=stream.device), 2 + layout.low_bits
    entries = _bits(stream[:, : layout.entries_nbytes])[:, : layout.kept * bits].view(len(stream), -1, bits)
    entries = (entries << torch.arange(bits, device=stream.device)).sum(2)
    ones = _bits(stream[:, layout.entries_nbytes :]).cumsum(1)
    at = torch.searchsorted(ones, (order + 1).expand(len(stream), -1).contiguous())
    places = (at - order << layout.low_bits) + (entries >> 2) + order & rule.chunk - 1
    return torch.where(at < ones.shape[1], places, rule.chunk), entries & 3


def _encode_chunks(p: Tensor, rule: ChunkRule) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes chunks of one length.

    Args:
        p: (chunks, elements) float32.
        rule: What is kept.

    Returns:
        The records (chunks, bytes) uint8, the places (chunks, kept) int64, and the values (chunks, kept) float32 that
        they decode to.
    """
    layout = _layout(rule, p.shape[1])
    kept = layout.kept
    keys = (p.contiguous().view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN_KEY)
    places = torch.argsort(keys, dim=1, descending=True, stable=True)[:, :kept].sort(1).values
    chosen = p.gather(1, places)
    magnitudes = chosen.abs()
    mean = _sum(magnitudes) / kept
    large = magnitudes >= mean
    counts = torch.cat([(~large).sum(1, keepdim=True), large.sum(1, keepdim=True)], dim=1)
    sums = torch.cat([_sum(torch.where(group, magnitudes, 0.0)) for group in (~large, large)], dim=1)
    levels = torch.where(counts > 0, sums / counts.clamp(min=1).float(), 0.0).to(torch.bfloat16)
    bits = torch.where(mean.isfinite(), levels.view(torch.int16), 0x7FC0)
    negative = chosen < 0
    records = torch.cat(
        [
            bits.contiguous().view(torch.uint8),
            _pack(places, large.long() + 2 * negative.long(), layout),
        ],
        dim=1,
    )
    return records, places, _values(bits, large, negative)


def _values(bits: Tensor, large: Tensor, negative: Tensor) -> Tensor:
    level = bits.view(torch.bfloat16).float().gather(1, large.long())
    return torch.where(negative, -level, level)


def _decode_chunks(records: Tensor, rule: ChunkRule, numel: int) -> tuple[Tensor, Tensor]:
    """Returns places (chunks, kept) int64, as _unpack's, and values of records of chunks with `numel` elements."""
    bits = records[:, :4].reshape(-1).clone().view(torch.int16).view(-1, 2)
    places, codes = _unpack(records[:, 4:], rule, _layout(rule, numel))
    return places, _values(bits, (codes & 1).bool(), (codes & 2).bool())


@dataclass(frozen=True, slots=True)
class ChunkTopkCodec(BlockCodec):
    """The largest magnitudes of each chunk as sign, one of two levels, and place.

    What it encodes is p = flat + decay * residual, and exactly p is what the payload and the new residual account for:
    approximation + new residual == p wherever nothing was sent, and within one rounding where something was. Of equal
    magnitudes the lower place counts as larger, and inf and NaN count as larger than any number. The kept values have
    two levels: the mean magnitude of those that reach the mean magnitude of all that are kept, and that of the others,
    both rounded to bfloat16. A chunk of zeros decodes to zeros; a chunk whose kept magnitudes have no finite sum
    decodes to NaN at every place that was kept.

    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706 (chunks of 4096,
        64 kept, 2 bits, decay 0.95); the two levels are one step of Lloyd's algorithm (IEEE Trans. Inf. Theory 28(2),
        1982) from the mean.
    """

    rule: ChunkRule

    family: ClassVar[str] = "chunk_topk"

    @property
    def parameters(self) -> tuple[float, ...]:
        """The rule's numbers."""
        return self.rule.chunk, self.rule.keep, self.rule.decay

    def wire_nbytes(self, numel: int) -> int:
        """See `Codec.wire_nbytes`."""
        return _nbytes(numel, self.rule)

    def torch_input(self, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """See `BlockFormat.torch_input`: gradient + decay * residual."""
        return gradient if residual is None else gradient + self.rule.decay * residual

    def torch_encode(self, p: Tensor, payload: Tensor) -> Tensor:
        """See `BlockFormat.torch_encode`: a record for each chunk.

        The levels (bfloat16: the smaller, the larger), then for each place in ascending order an entry of two bits
        (whether it has the larger level, whether it is negative) and the low bits of place i - i, then a bit vector:
        one i stands at its high part + i. Entries and vector start at a byte, the lowest bit first; as many low bits as
        make them smallest.
        """
        decoded = torch.zeros_like(p)
        for start, chunks, numel, at in _runs(p.numel(), self.rule):
            run = slice(start, start + chunks * numel)
            records, places, values = _encode_chunks(p[run].view(chunks, numel), self.rule)
            payload[at : at + records.numel()] = records.view(-1)
            decoded[run].view(chunks, numel).scatter_(1, places, values)
        return decoded

    def torch_add(self, payload: Tensor, total: Tensor) -> None:
        """See `BlockFormat.torch_add`."""
        for start, chunks, numel, at in _runs(total.numel(), self.rule):
            nbytes = self.rule.record_nbytes(numel)
            records = payload[at : at + chunks * nbytes].view(chunks, nbytes)
            places, values = _decode_chunks(records, self.rule, numel)
            run = total[start : start + chunks * numel].view(chunks, numel)
            sums = torch.zeros(chunks, self.rule.chunk + 1, device=total.device)  # room for places outside the chunk
            sums[:, :numel] = run
            run.copy_(sums.scatter_add_(1, places, values)[:, :numel])


class ChunkTopk(TwoStage):
    """The compressor "chunk_topk": 0.164 bits an element each way with the defaults.

    Published schemes gather everybody's payload everywhere; here owners sum and encode again, so that what a rank
    receives does not grow with the group.

    With decay 1 outputs and residuals account for every gradient, as with the other compressors. With a smaller one a
    residual e gives up (1 - decay) e each time that it is added to the next gradient, on both stages: after T steps the
    outputs and the residuals together are the gradients less what was given up. `flush` and moving state give up
    nothing.

    Args:
        chunk: Elements of a chunk, a power of two from 256 to 4096.
        keep: How many of each chunk are sent, 1 to min(chunk, 512); of a shorter chunk the same share, rounded up.
        decay: Factor of the residual before it is added to the next gradient, 0 to 1.
        residual: Keep what is left out; without, it is lost.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: An option is out of range.

    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """

    def __init__(
        self,
        *,
        chunk: int = 4096,
        keep: int = 64,
        decay: float = 0.95,
        residual: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        if chunk not in (256, 512, 1024, 2048, 4096):
            raise ValueError(f"`chunk` is {chunk}; wanted a power of two from 256 to 4096")
        if not 1 <= keep <= min(chunk, 512):
            raise ValueError(f"`keep` is {keep}; wanted 1 to {min(chunk, 512)}")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"`decay` is {decay}; wanted 0 <= decay <= 1")
        rule = ChunkRule(chunk, keep, float(decay))
        super().__init__("chunk_topk", ChunkTopkCodec(rule), residual=residual, warmup_steps=warmup_steps)
