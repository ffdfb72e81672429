"""bfloat16 with packed exponents: the same bits as "bf16" from fewer bytes."""

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gradwire.compressors.base import ALL_GATHER, ALL_TO_ALL, Collective, Layout, Member, Request
from gradwire.compressors.codecs.base import PieceCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.kernels.dispatch import KERNELS_ON, ExponentKernels
from gradwire.compressors.kernels.reference import EXPONENTS_BLOCK, exponents_most_nbytes, exponents_nbytes
from gradwire.compressors.kernels.reference.exponents import HEADER_NBYTES as EXPONENTS_HEADER_NBYTES
from gradwire.compressors.two_stage import Residuals, TwoStage, parts_of, two_stage

logger = logging.getLogger("gradwire")

PACKED_SHARE = 0.69
"""Bytes that packing leaves of bf16's, as plans expect it: 11 bits a value. Gradients of both convergence tasks take
0.52 to 0.66 (docs/results/number_formats.md); normally distributed values of one size 0.68."""

SLACK = 64
"""A reduced payload gets room for the longest summand and a 64th of it: 5 of 36 sums of real gradients were longer."""

REST_STEPS = 64
"""Steps for which a shard travels as plain bf16 after packing has not paid; twice as many each time that it does not
again."""
MOST_REST_STEPS = 4096
"""Steps after which it is tried again in any case."""


@dataclass(slots=True)
class _Trial:
    """What packing a shard has given so far; the same on all ranks of its group."""

    saved: float | None = None
    """Share of bf16's bytes that packing saved the last time; None before the first."""
    rest_until: int = 0
    """The step from which on it is packed (again), whatever is expected of it."""
    rest_steps: int = REST_STEPS
    """How long it rests next time."""


@dataclass(slots=True)
class PackingTotals:
    """What packing has given on this rank since the compressor was made; `str` is a line of the report.

    Attributes:
        packed: Shards that were packed.
        plain: Shards that travelled as plain bf16.
        nbytes: Of the longest payloads of the packed shards, there and back.
        plain_nbytes: What those would have been in bf16.
        reasons: Why shards travelled plain, and how many.
    """

    packed: int = 0
    plain: int = 0
    nbytes: int = 0
    plain_nbytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"bf16_packed: {self.packed} shards packed"
        if self.plain_nbytes:
            text += f", to {self.nbytes / self.plain_nbytes:.3f} of bf16's bytes"
        reasons = "".join(f"; {count} because {reason}" for reason, count in self.reasons.items())
        return f"{text}; {self.plain} sent as plain bf16{reasons}"


def _packed_two_stage(
    source: Tensor,
    target: Tensor,
    group: Member,
    codec: CastCodec,
    residuals: Residuals,
    kernels: ExponentKernels,
) -> Generator[Collective, None, tuple[int, int]]:
    """Does what `two_stage` does with `codec`, in three collectives or four; see `PackedCast`.

    Args:
        source: As for `two_stage`, on the CPU.
        target: As for `two_stage`.
        group: As for `two_stage`.
        codec: To bfloat16.
        residuals: As for `two_stage`.
        kernels: Pack and unpack.

    Yields:
        An all_gather of lengths, an all_to_all, an all_gather, and sometimes another one.

    Returns:
        Bytes of the longest payload and of the longest reduced one, together, and of both in bf16; the same on all
        ranks.
    """
    parts, numel = parts_of(source.numel(), group.size, group.shares), source.numel()
    pieces, width, most = parts.pieces, parts.width, exponents_most_nbytes(parts.width)
    words = source.new_empty(pieces * width, dtype=torch.bfloat16)
    codec.encode_residual(source, residuals.worker, residuals.new_worker, words[:numel].view(torch.uint8))
    words[numel:].zero_()
    runs = residuals.worker is not None
    blocks = (
        words.view(pieces, -1, EXPONENTS_BLOCK) if runs else words.view(-1, pieces, EXPONENTS_BLOCK).transpose(0, 1)
    )
    packed = source.new_empty(pieces, most, dtype=torch.uint8)
    lengths = [kernels.exponents_pack(piece, row) for piece, row in zip(blocks, packed, strict=True)]
    longest = source.new_empty(group.size, dtype=torch.int64)
    yield Collective(ALL_GATHER, (longest, torch.full_like(longest[:1], max(lengths))))

    nbytes = _checked(int(longest.max()), most, width)
    payloads = _cut(packed, lengths, 0, nbytes)
    own = parts.owned[group.rank + 1] - parts.owned[group.rank] if group.shares else 1
    received = source.new_empty(group.size * own, nbytes, dtype=torch.uint8)
    yield Collective(ALL_TO_ALL, (received, payloads), parts.owned)

    start, stop = parts.bounds(group.rank)
    summands = source.new_empty(group.size, width, dtype=torch.bfloat16)
    total = source.new_zeros(width, dtype=torch.bfloat16)
    reduced, lengths = packed[:own], []  # what was sent is not needed any more
    for piece in range(own):
        for row, summand in zip(received[piece::own], summands, strict=True):
            kernels.exponents_unpack(row, summand.view(-1, EXPONENTS_BLOCK))
        low = piece * width
        count = max(0, min(stop - start - low, width)) if runs else width
        old, new = residuals.server, residuals.new_server
        codec.reduce_encode(
            summands.view(torch.uint8)[:, : 2 * count],
            old if old is None else old[low : low + count],
            new if new is None else new[low : low + count],
            total[:count].view(torch.uint8),
            count,
        )
        total[count:].zero_()
        lengths.append(kernels.exponents_pack(total.view(-1, EXPONENTS_BLOCK), reduced[piece]))
    room = min(nbytes + nbytes // SLACK, most)
    gathered = source.new_empty(pieces, room, dtype=torch.uint8)
    yield Collective(ALL_GATHER, (gathered, _cut(reduced, lengths, 0, room)), parts.owned)

    needed = _checked(max(exponents_nbytes(row, width) for row in gathered), most, width)
    if needed > room:
        rest = source.new_empty(pieces, needed - room, dtype=torch.uint8)
        yield Collective(ALL_GATHER, (rest, _cut(reduced, lengths, room, needed)), parts.owned)
        gathered = torch.cat([gathered, rest], 1)
    for row, piece in zip(gathered, blocks, strict=True):
        kernels.exponents_unpack(row, piece)
    codec.decode(words[:numel].view(torch.uint8), target)
    return nbytes + max(needed, room), 4 * width


def _checked(nbytes: int, most: int, numel: int) -> int:
    """Returns how long payloads are said to be, before memory is taken for them: all ranks have been told the same.

    Raises:
        ValueError: No payload of so many values is that long.
    """
    if not EXPONENTS_HEADER_NBYTES <= nbytes <= most:
        raise ValueError(
            f"`payload` says that it has {nbytes} bytes; wanted {EXPONENTS_HEADER_NBYTES} to {most}, as {numel} values "
            "take: it is damaged"
        )
    return nbytes


def _cut(rows: Tensor, lengths: Sequence[int], start: int, stop: int) -> Tensor:
    """Returns the bytes `start` to `stop` of all rows, zero behind each one's length, so that no old memory is sent."""
    for row, length in zip(rows, lengths, strict=True):
        row[max(start, length) : stop].zero_()
    return rows[:, start:stop].contiguous()


class PackedCast(TwoStage):
    """The compressor "bf16_packed": the bits of "bf16" on all ranks, from fewer bytes.

    Lengths of payloads depend on the values, which no collective may: so the ranks of a group first tell each other how
    long their longest payload is, in an all_gather of 8 bytes each, and all payloads are sent that long. Whose sums
    are longer than their summands is seen from their headers, by all ranks alike: then, and only then, a second
    all_gather carries the rest. The values of a payload are not a run of the shard: blocks of 64 are dealt out to the
    ranks in turn, so that no rank gets all the zeros and all payloads are about as long. With a residual they are runs,
    because owners keep residuals of runs.

    A shard goes as plain bf16 where packing is expected to save less than its group's links make of it
    (`Member.break_even`), on CUDA, where the host would have to wait for every length, and while the first steps are
    watched. What is expected is what packing the shard saved the last time; before that, `PACKED_SHARE`. Now and then
    it is tried against the expectation. Of all that all ranks decide alike, by the same lengths and steps. Nothing of
    it is state: it is forgotten when a state is loaded, and when the ranks exchange otherwise (`replanned`).

    Args:
        always: Pack on a CPU whatever the links and whatever it has saved, where cores are to spare; but not while the
            first steps are watched.
        residual: Feed the rounding error back.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    name = "bf16_packed"
    plain_name = "bf16"

    def __init__(self, *, always: bool = False, residual: bool = False, warmup_steps: int = 0) -> None:
        super().__init__(self.name, CastCodec("bfloat16"), residual=residual, warmup_steps=warmup_steps)
        self.always = always
        self.watched = False
        """Whether the transfers under way show what the links give: packing would count as time of the link."""
        self.totals = PackingTotals()
        self._trials: dict[tuple[Layout, Member], _Trial] = {}
        self._counting = threading.Lock()

    @property
    def by_element(self) -> bool:
        """See `Stateful.by_element`."""
        return not self.residual

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """See `Compressor.wire_nbytes`: what plans expect; what is sent depends on the values."""
        return round(PACKED_SHARE * super().wire_nbytes(layout, group_size))

    def expects_to_pack(self, break_even: float, device_type: str) -> bool:
        """Whether a shard is packed of whose values nothing is known yet.

        Args:
            break_even: See `Member.break_even`.
            device_type: `cpu` or `cuda`.
        """
        pays = self.always or 1 - PACKED_SHARE > break_even
        return pays and device_type == "cpu" and not self.watched

    def expected_nbytes(self, layout: Layout, group_size: int, break_even: float, device_type: str) -> int:
        """What `wire_nbytes` is where it is known whether a shard is packed; arguments as there and above."""
        if self.expects_to_pack(break_even, device_type):
            return self.wire_nbytes(layout, group_size)
        return super().wire_nbytes(layout, group_size)

    def payload_note(self, break_even: float, device_type: str) -> str:
        """See `Packer.payload_note`."""
        if device_type == "cuda":
            return "Exponents are not packed: on CUDA the host would have to wait for the length of every payload."
        if self.watched:
            return "Exponents are not packed yet: the first steps show what the links give."
        if not self.expects_to_pack(break_even, device_type):
            return "Exponents are not packed: these links are too fast for the time that it takes."
        if self.always or not break_even:
            return "Exponents are packed."
        return f"Exponents are packed where that saves more than {break_even:.1%} of bf16's bytes."

    def note(self) -> str:
        """See `Stateful.note`."""
        with self._counting:
            return str(self.totals) if self.totals.packed or self.totals.plain else ""

    def replanned(self) -> None:
        """See `Stateful.replanned`."""
        self._trials = {}  # a new one: shards under way write to the old one

    def exchange(
        self, source: Tensor, target: Tensor, layout: Layout, group: Member, codec: PieceCodec, residuals: Residuals
    ) -> Iterator[Request]:
        """See `TwoStage.exchange`."""
        assert isinstance(codec, CastCodec)
        trial = self._trials.setdefault((layout, group), _Trial())
        kernels = KERNELS_ON[source.device.type]
        reason = ""
        if source.device.type == "cuda":
            reason = "on CUDA the host would have to wait for the length of every payload"
        elif not hasattr(kernels, "exponents_pack"):
            reason = f"the kernels registered for {source.device.type} cannot pack exponents"
        elif self.watched:
            reason = "the first steps show what the links give, and nothing else"
        elif not self.always:
            reason = self._rests(trial, group.break_even)
        if reason:
            self._count_plain(reason)
            yield from two_stage(source, target, group, codec, codec, residuals)
            return
        packing = cast(ExponentKernels, kernels)  # isinstance asks `typing`, which takes longer than a small shard
        longest, plain = yield from _packed_two_stage(source, target, group, codec, residuals, packing)
        with self._counting:
            self.totals.packed += 1
            self.totals.nbytes += longest
            self.totals.plain_nbytes += plain
        trial.saved = saved = 1 - longest / plain
        if saved > group.break_even or self.always:
            trial.rest_steps = REST_STEPS
            return
        trial.rest_until = self.step + trial.rest_steps
        trial.rest_steps = min(2 * trial.rest_steps, MOST_REST_STEPS)
        logger.info(
            "gradwire: bf16_packed saved %.1f %% of the bytes of %d values, %.1f %% pay: plain bf16 until step %d",
            100 * saved,
            layout.numel,
            100 * group.break_even,
            trial.rest_until,
        )

    def _rests(self, trial: _Trial, break_even: float) -> str:
        """Why a shard is not packed in this step; empty where it is."""
        expected = 1 - PACKED_SHARE if trial.saved is None else trial.saved
        if expected > break_even:
            return ""
        if not trial.rest_until:
            trial.rest_steps = MOST_REST_STEPS if trial.saved is None else trial.rest_steps
            trial.rest_until = self.step + trial.rest_steps
        if break_even < 1 and self.step >= trial.rest_until:
            return ""
        if trial.saved is None:
            return (
                f"on these links packing would have to save {min(break_even, 1.0):.0%} of the bytes to take no longer "
                f"than it costs, and is expected to save {expected:.0%}"
            )
        return "packing saved too little of them before; it is tried again after a while"

    def _count_plain(self, reason: str) -> None:
        with self._counting:
            self.totals.plain += 1
            known = reason in self.totals.reasons
            self.totals.reasons[reason] = self.totals.reasons.get(reason, 0) + 1
        if not known:
            logger.info("gradwire: bf16_packed travels as plain bf16: %s", reason)
