"""The plan of each size of bucket and this rank's part in it, worked out once for each size."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from typing import TYPE_CHECKING

import torch

from gradwire.comms.config import Config
from gradwire.comms.links.estimates import Links
from gradwire.comms.plan.chooser import PlanChooser
from gradwire.comms.plan.cost import sent_nbytes
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, Phase, Plan, Transfer
from gradwire.comms.plan.planner import make_phases
from gradwire.comms.plan.schedule import (
    ALIGN_NUMEL,
    Partition,
    Schedule,
    equal_partition,
    even_partition,
    executable,
    member_shares,
)
from gradwire.compressors.base import Compressor, Layout, keeps_momentum, traits_of
from gradwire.topology.cluster import Cluster, Level

if TYPE_CHECKING:
    from gradwire.comms.plan.payloads import Payloads

log = logging.getLogger("gradwire")

BucketKey = tuple[int, torch.dtype, Layout | None]
"""(Number of elements, dtype, layout of parameters or None if never compressed): buckets with one key have one plan."""

LaneGroup = tuple[tuple[int, int], tuple[int, ...]]
"""A lane, and the global ranks that run collectives with each other in it, ascending."""


@dataclass(frozen=True, slots=True)
class PhasePart:
    """One rank's part in one phase of one chunk.

    Attributes:
        phase: The phase.
        steps: Transfers of this rank, step by step. A compressed phase has one step, with a transfer for each shard.
        layouts: Layout of each shard of a compressed phase; empty for an exact one.
        shares: For each shard of a compressed phase, the weights of the parts that its members own; empty for equal
            parts.
        whole_chunk: Whether one transfer of the first step covers the chunk, so that it can apply the factor of
            the all-reduce in the same pass over memory.
        shards: Number of regions of the chunk in which this rank takes part.
        logical_numel: Number of elements of those regions.
        sent_numel: Number of elements that this rank sends; 0 for a compressed phase, whose payloads are counted when
            they are sent.
        rings: For an exact all_reduce with unequal parts that sums in the order of gloo's rings (see
            `Phase.in_ring_order`), the range of elements (first, one past the last) of each ring; else empty.
    """

    phase: Phase
    steps: tuple[tuple[Transfer, ...], ...]
    layouts: tuple[Layout, ...]
    shares: tuple[tuple[int, ...], ...]
    whole_chunk: bool
    shards: int
    logical_numel: int
    sent_numel: float
    rings: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of elements of a bucket, and this rank's part in each phase for it.

    Attributes:
        start: First element.
        stop: One past the last element.
        parts: Parts of this rank, one for each phase.
    """

    start: int
    stop: int
    parts: tuple[PhasePart, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part in a plan, for one bucket size.

    Attributes:
        plan: The plan.
        chunks: Chunks of the bucket, in order.
        lanes: Lanes that each chunk visits on every rank: the first, and one more after each asynchronous phase. A
            compressed phase begins in the lane where the phase before has ended, (0, 0) behind a synchronous one: there
            it encodes and sends first. The rounds after that are in lanes (phase, 1), (phase, 2), ..., which are not
            listed here: `Programs._compressed` passes through them.
        turn: Number of phases before the closing all-gathers, which only copy sums: after so many phases all sums are
            made.
        direct: Whether the plan is one all-reduce over all ranks, as without gradwire.
    """

    plan: Plan
    chunks: tuple[Chunk, ...]
    lanes: tuple[tuple[int, int], ...]
    turn: int
    direct: bool

    def compressed_shards(self) -> list[tuple[int, int]]:
        """Returns the ranges of elements that this rank compresses."""
        return [
            (transfer.start, transfer.stop)
            for chunk in self.chunks
            for part in chunk.parts
            if part.phase.compressor
            for transfer in part.steps[0]
        ]

    @property
    def shares_ownership(self) -> bool:
        """Whether ranks of a node compress different shards of its sum; else each has residuals of its own."""
        return not any(phase.whole for phase in self.plan.phases if phase.compressor)


class RankPlans:
    """The plans of one communicator's buckets, as this rank runs them; `plan_for` plans each bucket size once.

    Invariant: all ranks ask for the same buckets, and change links or choice at the same point of the sequence of
    collectives, so that all run the same plan. One thread at a time: the one that starts all-reduces.

    Args:
        cluster: Placement of the ranks, and rates of the links between them.
        rank: This rank.
        device_type: Device of the buckets: `cpu` or `cuda`.
        config: Configuration; its option `plan` restricts the choice.
        compressor: Compressor of one phase of buckets that have a layout; None if all is exact.

    Attributes:
        links: Rates of the links; changed by `measured` and `learned` alone.
        payloads: Bytes and codec seconds of what the compressor sends; None without a compressor.
        chooser: Chooses the plan of a bucket size.
        planned: Plans made so far.
    """

    def __init__(
        self, cluster: Cluster, rank: int, device_type: str, config: Config, compressor: Compressor | None
    ) -> None:
        self.links = Links(cluster)
        library = "nccl" if device_type == "cuda" else "gloo"
        self.payloads = None if compressor is None else _payloads(compressor, self.links, device_type)
        self.chooser = PlanChooser(self.links, config, compressor, self.payloads, library)
        self._rank = rank
        self._device_type = device_type
        self._fixed_order = config.fuses
        self._compressor = compressor
        self.planned: dict[BucketKey, RankPlan] = {}
        self._has_warned = False
        self._unlisted: dict[tuple[int, torch.dtype], RankPlan] = {}

    @property
    def cluster(self) -> Cluster:
        """Placement of the ranks, with the link rates that plans are chosen by."""
        return self.links.cluster

    @property
    def library(self) -> str:
        """`nccl` on GPUs, else `gloo`."""
        return self.chooser.library

    def plan_for(self, numel: int, dtype: torch.dtype, layout: Layout | None = None) -> RankPlan:
        """Returns this rank's part of the plan for a bucket; chooses and logs the plan at the first one of that form.

        Args:
            numel: Number of elements of the bucket.
            dtype: Dtype of the elements.
            layout: Parameters of the bucket, if it may be compressed.

        Raises:
            ValueError: The layout is of another number of elements, or the plan compresses and there is no compressor.
        """
        key = (numel, dtype, layout)
        if key in self.planned:
            return self.planned[key]
        choice = self.chooser.choose(numel * dtype.itemsize, layout)
        if layout is not None and not any(phase.compressor for phase in choice.plan.phases):
            self._warn_of_lost_momentum()
        self.planned[key] = rank_plan = self.along(numel, choice.plan, layout, choice.equal_shares)
        log.info("%d elements of %s: %s", numel, dtype, rank_plan.plan.describe(self.cluster.level_names))
        return rank_plan

    def _warn_of_lost_momentum(self) -> None:
        """Warns once of a compressor with the optimizer's momentum in a job of one rank, where no plan has a phase."""
        if not self._has_warned and self._compressor is not None and keeps_momentum(self._compressor):
            self._has_warned = True
            log.warning(
                "this job has one rank, so nothing is compressed and nothing applies the momentum of %s: leave "
                "`compressor` out and set the momentum in the optimizer",
                self._compressor.name,
            )

    def unlisted(self, numel: int, dtype: torch.dtype) -> RankPlan:
        """Returns this rank's part in the exact plan of a message that is no gradient; reports do not list it.

        Args:
            numel: Number of elements of the message.
            dtype: Dtype of the elements.
        """
        if (numel, dtype) not in self._unlisted:
            self._unlisted[numel, dtype] = self.along(numel, self.chooser.plan(numel * dtype.itemsize, None))
        return self._unlisted[numel, dtype]

    def clear(self) -> None:
        """Forgets all plans, so that they are chosen again."""
        self.planned.clear()
        self._unlisted.clear()

    def along(self, numel: int, plan: Plan, layout: Layout | None = None, base: Plan | None = None) -> RankPlan:
        """Returns this rank's part in a given plan.

        Args:
            numel: Elements of the bucket.
            plan: The plan.
            layout: Parameters of the bucket, if it may be compressed.
            base: Plan with equal shares whose order of sums is kept, for an exact plan that sums in the order of rings;
                None for all others.

        Raises:
            ValueError: The plan compresses a phase, and there is no compressor or no layout to do so with; or the
                layout is of another number of elements; or an exact plan sums in the order of rings, and no `base`
                says which.
        """
        if layout is not None and layout.numel != numel:
            raise ValueError(
                f"`layout` is of {layout.numel} elements, but `flat` has {numel}; wanted slices that cover all of "
                "`flat`: what lies outside of them would stay unreduced"
            )
        named = next((phase.compressor for phase in plan.phases if phase.compressor), None)
        if named and (self._compressor is None or layout is None):
            raise ValueError(
                f"`plan` compresses with {named}, but this communicator has no compressor or the bucket no layout: "
                "nothing would be compressed"
            )
        # Fix how each phase runs, and the cuts between chunks and shards.
        plan = executable(plan, self.cluster, self._device_type, fixed_order=self._fixed_order)
        partition = self._partition(plan, layout)
        schedule = Schedule(self.cluster, plan)
        rings: list[tuple[int, int]] = []
        if not named and _in_ring_order(plan):
            if base is None:
                raise ValueError(
                    f"`base` is None, and {plan.describe(self.cluster.level_names)} sums in the order of rings: pass "
                    "the plan with equal shares whose rings these are"
                )
            rings = self._rings(numel, base, layout)
        # Collect this rank's part in each phase, chunk by chunk.
        chunks = tuple(
            Chunk(
                start,
                stop,
                tuple(
                    self._part(phase, steps, (start, stop), layout, rings)
                    for phase, steps in zip(
                        plan.phases, schedule.transfers(stop - start, partition, start), strict=True
                    )
                ),
            )
            for start, stop in pairwise(partition(0, numel, plan.chunks))
        )
        # A chunk enters another lane after each asynchronous phase; the closing all-gathers only copy sums.
        hops = [(number + 1, 0) for number, phase in enumerate(plan.phases) if phase.asynchronous]
        turn = max((number for number, phase in enumerate(plan.phases, 1) if phase.op != ALL_GATHER), default=0)
        direct = len(chunks) == len(plan.phases) == 1 and plan.phases[0].whole and not plan.phases[0].compressor
        return RankPlan(plan, chunks, ((0, 0), *hops), turn, direct)

    def _rings(self, numel: int, base: Plan, layout: Layout | None) -> list[tuple[int, int]]:
        """Returns the ranges of a bucket that a plan with equal shares sums in one ring each, ascending.

        Args:
            numel: Elements of the bucket.
            base: Plan with equal shares.
            layout: Parameters of the bucket, if it may be compressed.

        Returns:
            (First element, one past the last) of each ring.
        """
        plan = executable(base, self.cluster, self._device_type, fixed_order=self._fixed_order)
        partition, schedule = self._partition(plan, layout), Schedule(self.cluster, plan)
        return sorted(
            {
                (transfer.start, transfer.stop)
                for start, stop in pairwise(partition(0, numel, plan.chunks))
                for transfer in chain.from_iterable(
                    chain.from_iterable(schedule.transfers(stop - start, partition, start))
                )
                if transfer.op == ALL_REDUCE
            }
        )

    def groups(self, nbytes: int) -> dict[LaneGroup, bool]:
        """Returns every (lane, set of ranks) that buckets of `nbytes` use: dense, compressed or migrated.

        All ranks get the same ones in the same order, and each connects those that it is in in this order, so no cycle
        of ranks waits for each other. Once `fix_plan` has chosen a plan, buckets of other sizes need no further ones.

        Args:
            nbytes: Size of a bucket.

        Returns:
            (Lane, ranks) -> True if ranks send each other parts of a bucket there, False for all-reduces alone.
        """
        compressor = self._compressor
        numel = ALIGN_NUMEL * prod(self.cluster.widest(level) for level in range(self.cluster.depth))  # no empty part
        plans, rounds = [self.chooser.plan(nbytes, None)], 1
        name = self.chooser.compressed_name()
        if name is not None and compressor is not None:
            traits = [traits_of(each) for each in traits_of(compressor).every()]
            owned = any(each.has_owners for each in traits)
            phases = make_phases(self.cluster, name, compressor.name, owned=owned)
            plans.append(Plan(name, phases, 1, numel, 0.0, {}, ""))
            by_owners = any(phase.shares for phase in phases)
            rounds = max(each.rounds(by_owners=by_owners) for each in traits)
        found: dict[LaneGroup, bool] = {}
        for plan in plans:
            plan = executable(plan, self.cluster, self._device_type, fixed_order=self._fixed_order)
            lane = (0, 0)
            # The lanes are those that `Programs.run_chunk` passes through.
            for index, phase_steps in enumerate(Schedule(self.cluster, plan).transfers(numel, equal_partition)):
                phase = plan.phases[index]
                for number, step in enumerate(phase_steps * (rounds if phase.compressor else 1)):
                    lane = (index, number) if number else lane
                    for transfer in step:
                        sends_parts = phase.compressor is not None or transfer.op != ALL_REDUCE
                        found[lane, transfer.members] = found.get((lane, transfer.members), False) or sends_parts
                lane = (index + 1, 0) if phase.asynchronous else lane
        if name in ("hierarchical", "leader"):  # a compressor's state moves inside the node
            found.update((((0, 0), node), True) for node in self.cluster.nodes if len(node) > 1)
        return found

    def choose(self, plan: str, chunks: int, why: str) -> None:
        """Uses one plan for exact buckets of every size from the next bucket on; compressed ones keep their plan.

        Args:
            plan: `flat`, `hierarchical` or `leader`; `auto` chooses by size again.
            chunks: Number of chunks, of compressed buckets too; 0 leaves it to the planner.
            why: Reason as a sentence, for reports; empty keeps the planner's.
        """
        self.chooser.take(plan, chunks, why)
        self.clear()

    def fix_plan(self, nbytes: int) -> None:
        """Fixes the plan of exact buckets by name, the best for `nbytes`, so that all sums have one order.

        Chunks still depend on the size of a bucket, and compressed buckets have plans of their own. Does nothing if a
        plan was asked for by name.

        Args:
            nbytes: Size of a usual bucket.
        """
        if (best := self.chooser.best_for_all(nbytes)) is not None:
            self.choose(best.name, self.chooser.chunks, best.why)

    def measured(self, levels: Sequence[Level]) -> None:
        """Chooses plans by these link rates from now on, instead of assumed ones or those of NCCL's model.

        Args:
            levels: Levels with measured links.
        """
        self.links.decide(levels)
        self.clear()

    def learned(self, levels: Sequence[Level], *, at_start: bool = False) -> None:
        """Predicts with these link rates from now on; keeps the plans, because bits must not depend on a clock.

        Args:
            levels: Levels with the rates that were seen.
            at_start: Whether nothing was sent yet. Units with slower links then own smaller parts, in plans whose bits
                do not depend on that.
        """
        self.links.learn(levels, at_start=at_start)
        if at_start:
            self.clear()
        self._reprice()
        log.info("%s", self.links.describe())

    def _reprice(self) -> None:
        for key, rank_plan in self.planned.items():
            plan = self.chooser.repriced(rank_plan.plan, key[2])
            self.planned[key] = replace(rank_plan, plan=plan)

    def plans(self) -> list[Plan]:
        """Returns the plans in use."""
        return [rank_plan.plan for rank_plan in self.planned.values()]

    def _part(
        self,
        phase: Phase,
        steps: list[list[Transfer]],
        run: tuple[int, int],
        layout: Layout | None,
        rings: Sequence[tuple[int, int]] = (),
    ) -> PhasePart:
        own = [tuple(transfer for transfer in step if self._rank in transfer.members) for step in steps]
        while len(own) > 1 and not own[-1]:
            own.pop()
        first = own[0] if own else ()
        layouts: tuple[Layout, ...] = ()
        if phase.compressor and self._compressor is not None and layout is not None:
            layouts = tuple(layout.cut(transfer.start, transfer.stop) for transfer in first)
        logical = sum(transfer.stop - transfer.start for transfer in first)
        sent = 0.0 if layouts else sum(self._sent_numel(transfer) for step in own for transfer in step)
        whole = len(first) == 1 and (first[0].start, first[0].stop) == run
        shares = tuple(member_shares(phase, transfer) for transfer in first) if layouts else ()
        within = tuple(ring for ring in rings if ring[0] < run[1] and run[0] < ring[1]) if phase.in_ring_order else ()
        return PhasePart(phase, tuple(own), layouts, shares, whole, len(first), logical, sent, within)

    def _sent_numel(self, transfer: Transfer) -> float:
        place = transfer.members.index(self._rank)
        return sent_nbytes(transfer.op, transfer.stop - transfer.start, len(transfer.members), place, transfer.bounds)

    def _partition(self, plan: Plan, layout: Layout | None) -> Partition:
        compressor = self._compressor
        exact = equal_partition if self._device_type == "cuda" else even_partition
        if compressor is None or layout is None:
            return exact
        if self._device_type == "cuda" and not any(phase.compressor for phase in plan.phases):
            return exact

        def partition(start: int, stop: int, parts: int) -> tuple[int, ...]:
            return tuple(start + offset for offset in compressor.partition(layout.cut(start, stop), parts))

        return partition


def _payloads(compressor: Compressor, links: Links, device_type: str) -> "Payloads":
    from gradwire.comms.plan.payloads import Payloads  # here: exact plans need none

    return Payloads(compressor, links, device_type)


def _in_ring_order(plan: Plan) -> bool:
    return any(phase.in_ring_order for phase in plan.phases)
