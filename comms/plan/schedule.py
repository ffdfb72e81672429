"""Schedules: the transfers of a plan, that is, which ranks run which collective on which elements.

Regions. Before the first phase there is one region, the bucket. A reduce_scatter at level l cuts every region into
`parts` smaller ones, one for each rail (a rail is a set of ranks, one in each unit, that own the same region). Inside
a unit with fewer children than rails a child owns several of them, so uneven nodes drive their NIC with all ranks.
The all_reduce is among the owners of each region; the all_gathers reverse the reduce_scatters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest

from gradwire.comms.plan.plan import ALL_REDUCE, Phase, Plan, Transfer
from gradwire.comms.plan.traffic import nbytes_by_level
from gradwire.compressors.base import equal_bounds, even_bounds
from gradwire.topology.cluster import Cluster

ALIGN_NUMEL = 16
"""Elements of float32 in a cache line of 64 bytes. Shards start at multiples, so no two ranks write to one line."""

ELEMENT_NBYTES = 4
"""Bytes of an element (float32) in predictions of bytes; the bytes of a bucket do not depend on its dtype."""

Partition = Callable[[int, int, int], tuple[int, ...]]
"""Function (start, stop, parts) -> `parts + 1` ascending offsets from start to stop at which a region is cut."""


@dataclass(frozen=True, slots=True)
class _Region:
    indices: tuple[int, ...]
    start: int
    stop: int


def even_partition(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """Cuts the elements from `start` to `stop` into parts whose lengths differ by at most 16 (`ALIGN_NUMEL`).

    Each part but the last has a multiple of 16 elements from `start` on, one cache line of float32; some parts are
    empty if there are fewer than 16 elements for each.

    Args:
        start: Index of the first element.
        stop: Index behind the last element.
        parts: Number of parts.

    Returns:
        `parts + 1` ascending offsets from `start` to `stop`.
    """
    return tuple(start + offset for offset in even_bounds(stop - start, parts, ALIGN_NUMEL))


def equal_partition(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """Cuts the elements from `start` to `stop` into parts of one length; the last part also takes the remainder.

    The length is a multiple of 16 (`ALIGN_NUMEL`) elements, at least 16 bytes in every dtype: the widest load of a GPU.
    The remainder is fewer than `parts * 16` elements. NCCL's reduce_scatter and all_gather take equal slices.

    Args:
        start: Index of the first element.
        stop: Index behind the last element.
        parts: Number of parts.

    Returns:
        `parts + 1` ascending offsets from `start` to `stop`.
    """
    return tuple(start + offset for offset in equal_bounds(stop - start, parts, ALIGN_NUMEL))


def child_shares(parts: int, count: int) -> tuple[int, ...]:
    """Returns which regions each child of a unit owns: child k those from index `found[k]` up to `found[k + 1]`.

    Args:
        parts: Number of regions.
        count: Number of children.

    Returns:
        `count + 1` ascending indices from 0 to `parts`.

    With fewer regions than children the first children own one each and the others none.
    """
    if parts < count:
        return tuple(min(index, parts) for index in range(count + 1))
    return even_bounds(parts, count)


class Schedule:
    """Makes the transfers of one plan on one cluster.

    Args:
        cluster: Placement of the ranks.
        plan: The plan.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.plan = plan
        self._parts = {phase.level: phase.parts for phase in plan.phases if phase.op != ALL_REDUCE}
        self._shares = {phase.level: phase.shares for phase in plan.phases if phase.op != ALL_REDUCE}
        self._children = cluster.children()

    def transfers(
        self, numel: int, partition: Partition = even_partition, start: int = 0
    ) -> list[list[list[Transfer]]]:
        """Returns the transfers of all ranks: one list for each phase, and in it one for each step.

        A phase is one step, unless its sums are made in rank order; a step begins when the one before it is done.
        Groups of one rank and empty regions are omitted.

        Args:
            numel: Elements of the chunk.
            partition: Function that cuts regions.
            start: First element of the chunk in the bucket.
        """
        regions = {0: [_Region((), start, start + numel)]}
        for level in range(self.cluster.depth):  # A level without a reduce_scatter leaves every region whole.
            regions[level + 1] = [
                smaller
                for region in regions[level]
                for smaller in _split(region, self._parts.get(level, 1), partition, self._shares.get(level, ()))
            ]
        return [self._steps(phase, list(self._phase(phase, regions))) for phase in self.plan.phases]

    def _steps(self, phase: Phase, transfers: list[Transfer]) -> list[list[Transfer]]:
        if not phase.in_rank_order:
            return [transfers]
        from gradwire.comms.plan.rank_order import rank_ordered  # here: most phases are one step

        expanded = [
            rank_ordered(transfer, self.cluster.share_a_node, member_shares(phase, transfer)) for transfer in transfers
        ]
        return [list(chain.from_iterable(step)) for step in zip_longest(*expanded, fillvalue=())]

    def _phase(self, phase: Phase, regions: dict[int, list[_Region]]) -> Iterator[Transfer]:
        if phase.whole:
            (region,) = regions[0]
            if self.cluster.size > 1 and region.stop > region.start:
                yield Transfer(phase.op, phase.level, tuple(range(self.cluster.size)), region.start, region.stop, ())
            return
        for (level, _), below in self._children.items():
            if level == phase.level and len(below) > 1:
                for region in regions[level]:
                    if region.stop > region.start:
                        members = tuple(self._owner(child, level - 1, region.indices) for child in below)
                        bounds = () if phase.op == ALL_REDUCE else _bounds(region, phase, len(below), regions)
                        yield Transfer(phase.op, level, members, region.start, region.stop, bounds)

    def _owner(self, unit: tuple[int, ...], level: int, indices: tuple[int, ...]) -> int:
        """Returns the rank in `unit` (of `level`; at -1 the unit is the rank itself) that owns the region `indices`."""
        if level < 0:
            return unit[0]
        below = self._children[level, unit]
        shares = child_shares(self._parts.get(level, 1), len(below))
        child = next(place for place in range(len(below)) if shares[place] <= indices[level] < shares[place + 1])
        return self._owner(below[child], level - 1, indices)


def member_shares(phase: Phase, transfer: Transfer) -> tuple[int, ...]:
    """Returns the weight of the part that each member of an all_reduce owns; empty asks for equal parts.

    It is empty if the phase has no `shares`, or if those of all members are 0: units with slow links may own nothing.

    Args:
        phase: Phase of the plan.
        transfer: Transfer of that phase, between the members.
    """
    shares = tuple(phase.shares[rank] for rank in transfer.members) if phase.shares else ()
    return shares if any(shares) else ()


def _split(region: _Region, parts: int, partition: Partition, shares: Sequence[int]) -> Iterator[_Region]:
    # A partition makes equal parts only, so each unequal part is several of the smallest.
    if shares:
        finest = partition(region.start, region.stop, sum(shares))
        cuts = tuple(finest[place] for place in accumulate(shares, initial=0))
    else:
        cuts = partition(region.start, region.stop, parts)
    for index in range(parts):
        yield _Region((*region.indices, index), cuts[index], cuts[index + 1])


def _bounds(region: _Region, phase: Phase, count: int, regions: dict[int, list[_Region]]) -> tuple[int, ...]:
    smaller = [part for part in regions[phase.level + 1] if part.indices[:-1] == region.indices]
    cuts = [part.start - region.start for part in smaller] + [region.stop - region.start]
    return tuple(cuts[index] for index in child_shares(phase.parts, count))


def executable(plan: Plan, cluster: Cluster, device_type: str, *, fixed_order: bool) -> Plan:
    """Returns the plan with the fields that say how each phase runs: asynchronous or not, and the order of sums.

    Args:
        plan: Plan of the planner.
        cluster: Placement of the ranks.
        device_type: Device of the bucket; on a CPU the ranks of a node use shared memory.
        fixed_order: Whether sums between nodes are made in rank order, as those with unequal shares are anyway. gloo's
            ring sums an element in an order that depends on its position, and fusion moves elements; so fusion needs,
            and pays for, a fixed order. Two ranks give the same bits in any order, and NCCL has an order of its own.
    """

    def completed(phase: Phase) -> Phase:
        local = phase.level == 0 and (not phase.whole or len(cluster.nodes) == 1)
        asynchronous = device_type != "cpu" or not local
        members = cluster.size if phase.whole else cluster.widest(phase.level)
        in_rank_order = (
            (fixed_order or bool(phase.shares))
            and phase.op == ALL_REDUCE
            and phase.compressor is None
            and device_type == "cpu"
            and asynchronous
            and members > 2
        )
        return replace(phase, asynchronous=asynchronous, in_rank_order=in_rank_order)

    made = replace(plan, phases=tuple(map(completed, plan.phases)))
    if not any(phase.in_rank_order for phase in made.phases):
        return made
    # An all_reduce that is split sends other bytes over other links than the ring that the planner has priced.
    numel = made.nbytes // ELEMENT_NBYTES
    transfers = chain.from_iterable(chain.from_iterable(Schedule(cluster, made).transfers(numel)))
    return replace(made, bytes_by_level=nbytes_by_level(cluster, transfers, ELEMENT_NBYTES))
