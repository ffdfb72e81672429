"""Walks a plan with one chunk of a bucket: the collectives of each phase, on the slices that this rank has a part in.

A chunk stays in the lane it is in as long as its collectives are done when they return (shared memory); after a phase
whose collectives are still on their way it hops to the next lane, which waits for them. Whether a phase hops is
decided by the plan alone, so all ranks hop alike, also those that have nothing to send in that phase.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from torch import Tensor

from gradwire.comms.compressed import LaneGroup, Switch, run_compressed
from gradwire.comms.lanes import Hop, Lane
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, Phase, Plan
from gradwire.comms.plan.rank_order import rank_order_ladder
from gradwire.comms.plan.schedule import Transfer
from gradwire.comms.report import Ledger
from gradwire.comms.transport.groups import Groups
from gradwire.comms.transport.torch_group import Works
from gradwire.compressors.base import Compressor, Layout, Work


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a bucket and what happens to it.

    Attributes:
        flat: The whole bucket, 1-D and contiguous; changed in place.
        start: First element of the run.
        stop: One past its last.
        transfers: This rank's transfers, phase by phase.
        scale: Factor on every rank's contribution.
        layout: Which parameter lies where in `flat`; needed by a compressor only.
        flush: Travel dense, with what the compressor holds back added.
    """

    flat: Tensor
    start: int
    stop: int
    transfers: list[list[Transfer]]
    scale: float
    layout: Layout | None = None
    flush: bool = False


@dataclass(frozen=True, slots=True)
class _Last:
    """How a phase ends: the works still on their way, and the bytes sent where the plan alone does not tell."""

    works: list[Work]
    sent_nbytes: float | None = None


class Executor:
    """Runs chunks on transport groups.

    Args:
        groups: Where communicators come from.
        rank: This rank.
        hops: Whether collectives of a phase are still on their way when they return.
        in_rank_order: Whether an exact all_reduce of this phase is taken apart, so that every element is summed in
            rank order wherever it lies.
        compressor: Used by the phases that name one.
        ledger: Counts calls, bytes and seconds.
    """

    def __init__(
        self,
        groups: Groups,
        rank: int,
        hops: Callable[[Phase], bool],
        compressor: Compressor | None,
        ledger: Ledger,
        in_rank_order: Callable[[Phase], bool] = lambda phase: False,
    ) -> None:
        self._groups = groups
        self._rank = rank
        self._hops = hops
        self._in_rank_order = in_rank_order
        self._compressor = compressor
        self._ledger = ledger

    def lanes(self, plan: Plan) -> tuple[Lane, ...]:
        """The lanes that every rank's job comes through, whatever its compressor does in between."""
        return ((0, 0), *((index + 1, 0) for index, phase in enumerate(plan.phases) if self._hops(phase)))

    def walk(self, chunk: Chunk, plan: Plan) -> Iterator[Hop]:
        """One chunk's way through the plan; see `lanes.Job`."""
        scale = chunk.scale
        lane: Lane = (0, 0)
        for index, phase in enumerate(plan.phases):
            mine = chunk.transfers[index]
            began = time.perf_counter()
            compressed = bool(phase.compressor and self._compressor)
            if scale != 1.0 and not _covered(chunk, mine):
                chunk.flat[chunk.start : chunk.stop].mul_(scale)
                scale = 1.0
            run = self._shrink if compressed else self._up_and_down if self._in_rank_order(phase) else self._at_once
            last = yield from run(chunk, mine, lane, index, scale)
            scale = 1.0
            if self._hops(phase):
                lane = (index + 1, 0)
                yield Hop(lane, Works(last.works))
            self._ledger.add(
                index, phase, self._rank, mine, chunk.flat.element_size(), time.perf_counter() - began, last.sent_nbytes
            )

    def _at_once(
        self, chunk: Chunk, transfers: list[Transfer], lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Last]:
        """A phase that is one collective for each of this rank's transfers."""
        return _Last([self._issue(chunk.flat, transfer, lane, scale) for transfer in transfers])
        yield

    def _up_and_down(
        self, chunk: Chunk, transfers: list[Transfer], lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Last]:
        """An all_reduce whose sums do not depend on where an element lies: rung after rung, a lane each."""
        ladders = [rank_order_ladder(transfer, self._rank, self._groups.is_synchronous) for transfer in transfers]
        works: list[Work] = []
        for step, rung in enumerate(zip(*ladders, strict=True)):
            if step:
                lane, scale = (index, step), 1.0
                yield Hop(lane, Works(works))
            works = [
                self._issue(chunk.flat, transfer, lane, scale) for transfer in rung if transfer.start < transfer.stop
            ]
        return _Last(works)

    def _shrink(
        self, chunk: Chunk, transfers: list[Transfer], lane: Lane, index: int, scale: float
    ) -> Generator[Hop, None, _Last]:
        """The compressed phase: this rank's shards go through the compressor, all in step, a lane a round."""
        if chunk.layout is None or self._compressor is None:
            raise RuntimeError("a compressed phase needs a compressor and the bucket's layout")
        switch = Switch(lane)
        shards = [chunk.flat[transfer.start : transfer.stop] for transfer in transfers]
        layouts = [chunk.layout.cut(transfer.start, transfer.stop) for transfer in transfers]
        groups = [LaneGroup(self._groups, self._rank, transfer.members, switch) for transfer in transfers]
        rounds = run_compressed(self._compressor, shards, layouts, groups, chunk.flush, scale)
        for step, pending in enumerate(rounds, start=1):
            yield Hop((index, step), pending)
            switch.lane = (index, step)
        return _Last([], sum(group.sent_nbytes for group in groups))

    def _issue(self, flat: Tensor, transfer: Transfer, lane: Lane, scale: float) -> Work:
        group = self._groups.get(lane, transfer.members)
        view = flat[transfer.start : transfer.stop]
        if transfer.op == ALL_GATHER:
            return group.all_gather_slices(view, transfer.bounds)
        if transfer.op == ALL_REDUCE:
            return group.all_reduce(view, scale)
        return group.reduce_scatter(view, transfer.bounds, scale)


def _covered(chunk: Chunk, transfers: list[Transfer]) -> bool:
    """Whether one transfer sends all of the chunk: it then scales, in the same pass or once it has its memory."""
    return len(transfers) == 1 and (transfers[0].start, transfers[0].stop) == (chunk.start, chunk.stop)
