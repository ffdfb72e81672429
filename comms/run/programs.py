"""What a launch is made of: generators that issue a chunk's collectives and yield where the chunk goes on.

Everything here calls downward: transports move bytes, compressors yield the collectives that they need. Who takes a
program forward, and when, an executor says; no program knows one.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gradwire.comms.lanes import Hop, Lane
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Exchange, Transfer
from gradwire.comms.plan.rank_plans import Chunk, PhasePart
from gradwire.comms.plan.schedule import has_owners_by_links
from gradwire.comms.run.all_reduces import RunningAllReduce
from gradwire.comms.run.phase_stats import PhaseStats
from gradwire.comms.streams import Mark
from gradwire.comms.transport.groups import Groups, IssuesTogether, Transport, way_back
from gradwire.comms.transport.sum_order import RingOrder
from gradwire.comms.transport.works import Works
from gradwire.compressors.base import Collective, Compressor, Layout, Member, Request, Work, weighted_bounds
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:  # each is loaded where it is asked for
    from gradwire.comms.transport.torch_group import GlooTransport

ALL_GATHER_SLICES = "all_gather_slices"
"""The method of a transport that is the inverse of `reduce_scatter`, beside the operations of compressors."""

OVERCOMMITTING = ("cpu",)
"""Devices that hand out more memory than they have: running out ends the process there, and no error is raised."""


@dataclass(slots=True)
class _Ended:
    """How a phase ends: the works still under way, and the bytes sent that the plan alone does not give."""

    works: list[Work]
    sent_nbytes: float = 0.0


class Programs:
    """The programs of one rank: what it issues for a chunk of a launch, and to move compression state.

    Args:
        groups: Where transports come from.
        rank: This rank.
        cluster: Where the ranks are.
        compressor: Used by the phases that name one.
        stats: Counts what is sent.

    Attributes:
        node: The ranks of this node.
    """

    def __init__(
        self, groups: Groups, rank: int, cluster: Cluster, compressor: Compressor | None, stats: PhaseStats
    ) -> None:
        self.node = cluster.ranks(cluster.unit(rank, 0))
        self._groups = groups
        self._rank = rank
        self._level_names = cluster.level_names
        self._compressor = compressor
        self._stats = stats

    @property
    def compresses(self) -> bool:
        """Whether there is a compressor."""
        return self._compressor is not None

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> Iterator[Hop]:
        """Takes one chunk through the phases of its plan.

        A coroutine: each step issues collectives and names the lane in which the next one runs.

        Args:
            run: The launch; elements `chunk.start` to `chunk.stop` of its `flat` (1-D, any dtype that the transports
                sum) are replaced by the scaled sum over all ranks, in place. In a compressed phase they go through
                float32.
            chunk: Which run of elements, and this rank's transfers.
        """
        flat, scale = run.flat, run.scale
        lane: Lane = (0, 0)
        began = self._stats.clock.now() if chunk.parts and self._stats.timing else None
        for index, part in enumerate(chunk.parts):
            if scale != 1.0 and not part.whole_chunk:
                flat[chunk.start : chunk.stop].mul_(scale)
                scale = 1.0
            if part.layouts:
                ended = yield from self._compressed(run, part, lane, index, scale)
            else:
                ended = yield from self._exact(flat, part, lane, index, scale)
            scale = 1.0
            if part.phase.asynchronous:
                lane = (index + 1, 0)
                yield Hop(lane, ended.works)
                ended.works.clear()  # they hold the buffers that were received
            if self._stats.recorder is not None and began is not None:
                self._note(run, index, part, began)
            if run.all_reduce.counted:
                began = self._stats.count(index, part, flat.element_size(), began, ended.sent_nbytes)
            elif began is not None:
                began = self._stats.clock.now()
        scale *= run.after
        if scale != 1.0:  # also for a single rank: its plan has no phases
            flat[chunk.start : chunk.stop].mul_(scale)

    def migrate(self, layout: Layout, shards: list[tuple[int, int]], device: torch.device, ask: bool) -> Iterator[Hop]:
        """Moves compression state inside this node; see `migration.migrate`.

        Args:
            layout: Which parameter lies where in a bucket.
            shards: The runs of it that this rank compresses.
            device: Where the bucket is.
            ask: See there.
        """
        assert self._compressor is not None
        node = self._groups[(0, 0), self.node] if len(self.node) > 1 else None
        from gradwire.comms.migration import migrate  # here: exact tensors have no state

        migrate(self._compressor, layout, shards, node, device, ask=ask)
        yield from ()

    def _exact(
        self, flat: Tensor, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Ended]:
        """The steps of an exact phase, each in a lane of its own."""
        works: list[Work] = []
        for number, step in enumerate(part.steps):
            if number:
                lane, scale = (index, number), 1.0
                yield Hop(lane, works)
                works.clear()
            works = []
            for transfer in step:
                by_links = number > 0 and has_owners_by_links(part.phase, transfer)
                works.append(self.issue(flat, transfer, way_back(lane) if by_links else lane, scale, part.rings))
        return _Ended(works)

    def _compressed(
        self, run: RunningAllReduce, part: PhasePart, lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Ended]:
        """The compressed phase: this rank's shards go through the compressor side by side, each round in a lane."""
        compressor, (transfers,) = self._compressor, part.steps
        recorder = self._stats.recorder
        assert compressor is not None
        shards = [run.flat[transfer.start : transfer.stop] for transfer in transfers]
        wide = [_contribution(shard, scale) for shard in shards]
        running: list[tuple[tuple[int, ...], Iterator[Request]]] = []
        by_links: set[tuple[int, ...]] = set()
        for transfer, layout, shares, shard in zip(transfers, part.layouts, part.shares, wide, strict=True):
            place = transfer.members.index(self._rank)
            member = Member(place, len(transfer.members), shares)
            steps = _flushed(compressor, shard, layout) if run.flush else compressor.all_reduce(shard, layout, member)
            if shares:
                by_links.add(transfer.members)
                steps = self._by_owners(steps, shares, part.phase.in_ring_order)
            running.append((transfer.members, steps))
        sent_nbytes, rounds = 0.0, 0
        while True:
            works: list[Work] = []
            for members, steps in running:
                if recorder is None:
                    request = next(steps, None)
                else:
                    with recorder.span(f"lane {lane[0]}.{lane[1]}", f"codec {compressor.name}"):
                        request = next(steps, None)
                if request is None:
                    continue
                collectives = (request,) if isinstance(request, Collective) else request
                issued_in = way_back(lane) if rounds and members in by_links else lane
                works.append(issue_together(self._groups[issued_in, members], collectives))
                sent_nbytes += sum(_sent_nbytes(each, len(members), members.index(self._rank)) for each in collectives)
            if not works:
                break
            rounds += 1
            lane = (index, rounds)
            yield Hop(lane, works)
        for shard, result in zip(shards, wide, strict=True):
            if result.data_ptr() != shard.data_ptr():
                shard.copy_(result)
        return _Ended([], sent_nbytes)

    def issue(
        self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float, rings: Sequence[tuple[int, int]] = ()
    ) -> Work:
        """Issues one transfer of an exact phase.

        Args:
            flat: 1-D, what travels in one piece; the transfer's run of it is changed in place.
            transfer: Which run, among whom.
            lane: Where it goes.
            scale: Factor on this rank's contribution.
            rings: Runs of `flat` that are summed in the order of gloo's rings; none where any order will do.
        """
        group = self._groups[lane, transfer.members]
        if isinstance(transfer, Exchange):
            from gradwire.comms.transport.exchange import exchange  # here: ranks of like nodes need none

            return exchange(group, flat, transfer, self._rank)
        whole = transfer.stop - transfer.start == flat.numel()  # a view costs the host what ten lines of Python do
        view = flat if whole else flat[transfer.start : transfer.stop]
        if transfer.op == ALL_GATHER:
            return group.all_gather_slices(view, transfer.bounds)
        if transfer.op == ALL_REDUCE:
            return group.all_reduce(view, scale)
        if rings:
            shifted = tuple((start - transfer.start, stop - transfer.start) for start, stop in rings)
            return _with_sum_order(group).reduce_scatter(view, transfer.bounds, scale, RingOrder(shifted))
        return group.reduce_scatter(view, transfer.bounds, scale)

    def _by_owners(self, steps: Iterator[Request], shares: Sequence[int], as_ring: bool) -> Iterator[Request]:
        """A compressor's collectives, with every all_reduce as a reduce_scatter to unequal owners and an all_gather."""
        for request in steps:
            collectives = (request,) if isinstance(request, Collective) else request
            sums = [each for each in collectives if each.op == ALL_REDUCE]
            if not sums:
                yield request
                continue
            others = [each for each in collectives if each.op != ALL_REDUCE]
            for op in (REDUCE_SCATTER, ALL_GATHER_SLICES):
                flats = [each.tensors[0].view(-1) for each in sums]
                halves = [Collective(op, (flat,), weighted_bounds(flat.numel(), shares), as_ring) for flat in flats]
                yield (*halves, *others)
                others = []

    def _note(self, run: RunningAllReduce, index: int, part: PhasePart, began: Mark) -> None:
        """Notes a phase in a trace; lanes note each hop themselves."""


def issue_together(transport: Transport, collectives: Sequence[Collective]) -> Work:
    """Issues collectives that may be under way together, one after the other where the transport knows no better way.

    NCCL has group calls; of two ranks on gloo small ones travel in one message.

    Args:
        transport: Of all of them.
        collectives: The same on all ranks, in the same order.

    Raises:
        RuntimeError: One of them could not be issued. On NCCL the transport is then of no use any more.
    """
    if len(collectives) == 1 and not collectives[0].bounds:  # as most are
        return _issue_one(transport, collectives[0])
    if hasattr(transport, "issue_together"):  # a protocol's isinstance() costs more than many a collective
        together = cast("IssuesTogether", transport).issue_together(collectives)
        if together is not None:
            return together
    works = [_issue_one(transport, each) for each in collectives]
    return works[0] if len(works) == 1 else Works(works)


def _with_sum_order(transport: Transport) -> "GlooTransport":
    """The same transport.

    Raises:
        TypeError: It cannot sum in the order of gloo's rings, and other bits would come of another order.
    """
    if not getattr(transport, "takes_sum_order", False):
        raise TypeError(
            f"`transport` is a {type(transport).__name__}, and the plan sums in the order of gloo's rings; wanted a "
            "GlooTransport: leave `probe` False with other transports"
        )
    return cast("GlooTransport", transport)


def _issue_one(transport: Transport, collective: Collective) -> Work:
    issue = getattr(transport, collective.op)
    if not collective.bounds:
        return cast(Work, issue(*collective.tensors))
    if collective.as_ring and collective.op == REDUCE_SCATTER:
        (flat,) = collective.tensors
        order = RingOrder(((0, flat.numel()),))
        return _with_sum_order(transport).reduce_scatter(flat, collective.bounds, order=order)
    if collective.op in (REDUCE_SCATTER, ALL_GATHER_SLICES):
        return cast(Work, issue(*collective.tensors, collective.bounds))
    output, source = collective.tensors
    width = output.shape[1:].numel()
    if collective.op == ALL_GATHER:
        start, stop = collective.bounds[transport.rank : transport.rank + 2]
        output[start:stop] = source
        return transport.all_gather_slices(output.view(-1), [width * bound for bound in collective.bounds])
    from gradwire.comms.transport.exchange import all_to_all_of  # here: equal parts need none

    splits = [width * (stop - start) for start, stop in pairwise(collective.bounds)]
    return all_to_all_of(transport, output.view(-1), source.view(-1), splits)


def _contribution(shard: Tensor, scale: float) -> Tensor:
    """Returns scale * shard in float32: the shard itself, or a copy that leaves it intact until the end.

    A compressor takes memory as it goes. Where that may fail, a gradient that is scaled first is not scaled in place.
    """
    if shard.dtype != torch.float32:
        return shard.float().mul_(scale)
    if scale == 1.0:
        return shard
    return shard.mul_(scale) if shard.device.type in OVERCOMMITTING else shard * scale


def _flushed(compressor: Compressor, shard: Tensor, layout: Layout) -> Iterator[Request]:
    """An exact all-reduce that sends what was held back along."""
    compressor.flush(shard, layout)
    yield Collective(ALL_REDUCE, (shard,))


def _sent_nbytes(collective: Collective, size: int, rank: int) -> float:
    """Bytes that one of `size` ranks sends in a collective of a compressor, headers not counted."""
    nbytes, bounds = collective.tensors[-1].nbytes, collective.bounds
    if collective.op == ALL_REDUCE:
        return 2 * (size - 1) / size * nbytes
    if collective.op == ALL_GATHER:
        return nbytes * (size - 1)
    own = (bounds[rank + 1] - bounds[rank]) / max(bounds[-1], 1) if bounds else 1 / size
    return nbytes * own * (size - 1) if collective.op == ALL_GATHER_SLICES else nbytes * (1 - own)
