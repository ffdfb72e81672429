"""Clusters; and a plan's transfers, run on plain arrays in one process and counted on every link: the proof of a plan.

Messages are real: every collective is taken apart into sends of array slices between two ranks, by the algorithm that
the cost model prices (all_reduce as a ring, tree or halving-doubling, direct reduce_scatter and all_gather, broadcast
down a chain). The postcondition of an all-reduce is
that every rank holds the sum of all ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from gradwire.comms.plan.algorithms import halving_ranks, halving_steps, tree_edges
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, HALVING_DOUBLING, TREE, Plan, Transfer
from gradwire.comms.plan.schedule import Partition, Schedule, even_partition
from gradwire.comms.plan.traffic import sole_owner
from gradwire.compressors.base import even_bounds
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link

Array = NDArray[np.int64]


def two_level_cluster(node_of_rank: Iterable[int], intra_node: Link, inter_node: Link) -> Cluster:
    """A cluster of nodes from the node number of each rank, in any order and of any sizes."""
    levels = (Level(LEVEL_NAMES[0], intra_node), Level(LEVEL_NAMES[1], inter_node))
    return Cluster(tuple((node,) for node in node_of_rank), levels)


class Wires:
    """Counts what leaves each unit: `(level, unit)` -> bytes, `(0, (rank,))` for traffic inside a node."""

    def __init__(self, cluster: Cluster, element_nbytes: int) -> None:
        self.cluster = cluster
        self.element_nbytes = element_nbytes
        self.egress: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)

    def send(self, source: int, target: int, numel: int) -> None:
        """Books a message on every link that it leaves a unit by."""
        crossed = self._crossing_level(source, target)
        if crossed == 0:
            self.egress[0, (source,)] += numel * self.element_nbytes
        for level in range(1, crossed + 1):
            self.egress[level, self.cluster.unit(source, level - 1)] += numel * self.element_nbytes

    def _crossing_level(self, source: int, target: int) -> int:
        """The highest level whose link a message between two ranks takes; 0 inside a node."""
        ours, theirs = self.cluster.locations[source], self.cluster.locations[target]
        for depth, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                return self.cluster.depth - 1 - depth
        return 0

    def busiest(self) -> dict[str, int]:
        """For each level's name the bytes of the busiest unit."""
        return {
            level.name: max((nbytes for (index, _), nbytes in self.egress.items() if index == number), default=0)
            for number, level in enumerate(self.cluster.levels)
        }


def simulate(
    cluster: Cluster,
    plan: Plan,
    inputs: Sequence[Array],
    partition: Partition = even_partition,
    element_nbytes: int = 4,
    wires: Wires | None = None,
) -> tuple[list[Array], dict[str, int]]:
    """Runs `plan` and returns every rank's result and the bytes of the busiest unit at each level.

    Args:
        cluster: Where the ranks are.
        plan: What to run.
        inputs: One int64 array for each rank, all of one length; left as they are.
        partition: Where a region may be cut.
        element_nbytes: Size of an element on the wire.
        wires: Takes what leaves each unit, where that is asked for too.
    """
    state = [array.copy() for array in inputs]
    wires = wires or Wires(cluster, element_nbytes)
    for transfer, algorithm in _transfers(cluster, plan, len(inputs[0]), partition):
        _run(transfer, algorithm, state, wires)
    return state, wires.busiest()


def transfers_of(cluster: Cluster, plan: Plan, numel: int, partition: Partition = even_partition) -> Iterator[Transfer]:
    """What `simulate` runs, chunk by chunk, phase by phase and step by step."""
    for transfer, _ in _transfers(cluster, plan, numel, partition):
        yield transfer


def _transfers(cluster: Cluster, plan: Plan, numel: int, partition: Partition) -> Iterator[tuple[Transfer, str]]:
    """Every transfer with the algorithm of its phase."""
    schedule = Schedule(cluster, plan)
    for start, stop in pairwise(partition(0, numel, plan.chunks)):
        for phase, steps in zip(plan.phases, schedule.transfers(stop - start, partition, start), strict=True):
            for transfer in chain.from_iterable(steps):
                yield transfer, phase.algorithm


def _run(transfer: Transfer, algorithm: str, state: list[Array], wires: Wires) -> None:
    views = [state[rank][transfer.start : transfer.stop] for rank in transfer.members]
    if transfer.op == ALL_REDUCE:
        if algorithm == TREE:
            _trees(views, wires)
        elif algorithm == HALVING_DOUBLING:
            _halving_doubling(views, wires)
        else:
            bounds = even_bounds(transfer.stop - transfer.start, len(views))
            _ring(transfer.members, views, bounds, wires, add=True)
            _ring(transfer.members, views, bounds, wires, add=False)
    elif transfer.op == ALL_GATHER and (owner := sole_owner(transfer.bounds)) is not None:
        _broadcast(transfer.members, views, owner, wires)
    else:
        _exchange(transfer, views, wires)


def _exchange(transfer: Transfer, views: list[Array], wires: Wires) -> None:
    """Every member sends straight to (or, gathering, is sent by) the owner of each piece."""
    for source, sender in enumerate(transfer.members):
        for target, receiver in enumerate(transfer.members):
            if source != target:
                owner = source if transfer.op == ALL_GATHER else target
                piece = slice(transfer.bounds[owner], transfer.bounds[owner + 1])
                if transfer.op == ALL_GATHER:
                    views[target][piece] = views[source][piece]
                else:
                    views[target][piece] += views[source][piece]
                wires.send(sender, receiver, piece.stop - piece.start)


def _broadcast(members: Sequence[int], views: list[Array], owner: int, wires: Wires) -> None:
    """Down a chain that starts at the owner."""
    for step in range(len(members) - 1):
        source, target = (owner + step) % len(members), (owner + step + 1) % len(members)
        views[target][:] = views[source]
        wires.send(members[source], members[target], len(views[source]))


def _trees(views: list[Array], wires: Wires) -> None:
    """Half of the bucket up and down each of two trees."""
    half = len(views[0]) // 2
    for piece, edges in zip(
        (slice(half), slice(half, None)), tree_edges([list(node) for node in wires.cluster.nodes]), strict=True
    ):
        parents = dict(edges)
        for child in sorted(parents, key=lambda rank: -_depth(rank, parents)):
            views[parents[child]][piece] += views[child][piece]
            wires.send(child, parents[child], len(views[child][piece]))
        for child in sorted(parents, key=lambda rank: _depth(rank, parents)):
            views[child][piece] = views[parents[child]][piece]
            wires.send(parents[child], child, len(views[child][piece]))


def _depth(rank: int, parents: dict[int, int]) -> int:
    return 1 + _depth(parents[rank], parents) if rank in parents else 0


def _halving_doubling(views: list[Array], wires: Wires) -> None:
    """Odd ranks take in their neighbours first; then pairs swap halves, ever smaller and ever farther, and back."""
    folded, distances = halving_steps(len(views))
    ranks = halving_ranks(len(views)).tolist()
    for even in range(0, 2 * folded, 2):
        views[even + 1][:] += views[even]
        wires.send(even, even + 1, len(views[even]))
    held = [(0, len(views[0]))] * len(ranks)
    history = []
    for distance in distances:
        history.append(held)
        held = [_half(*run, upper=bool(index & distance)) for index, run in enumerate(held)]
        messages = [views[ranks[index ^ distance]][start:stop].copy() for index, (start, stop) in enumerate(held)]
        for index, (start, stop) in enumerate(held):
            views[ranks[index]][start:stop] += messages[index]
            wires.send(ranks[index ^ distance], ranks[index], stop - start)
    for distance, wider in zip(reversed(distances), reversed(history), strict=True):
        for index in range(len(ranks)):
            start, stop = held[index ^ distance]  # what the partner has done, next to what is held here
            views[ranks[index]][start:stop] = views[ranks[index ^ distance]][start:stop]
            wires.send(ranks[index ^ distance], ranks[index], stop - start)
        held = wider
    for even in range(0, 2 * folded, 2):
        views[even][:] = views[even + 1]
        wires.send(even + 1, even, len(views[even]))


def _half(start: int, stop: int, *, upper: bool) -> tuple[int, int]:
    middle = (start + stop) // 2
    return (middle, stop) if upper else (start, middle)


def _ring(members: Sequence[int], views: list[Array], bounds: Sequence[int], wires: Wires, *, add: bool) -> None:
    """One pass around the ring: in step s, member k passes on piece k - s (adding) or k + 1 - s (copying)."""
    count = len(members)
    for step in range(count - 1):
        sent = []
        for index in range(count):
            piece = (index - step + (0 if add else 1)) % count
            sent.append((index, piece, views[index][bounds[piece] : bounds[piece + 1]].copy()))
        for index, piece, data in sent:
            target = (index + 1) % count
            view = views[target][bounds[piece] : bounds[piece + 1]]
            view[:] = view + data if add else data
            wires.send(members[index], members[target], len(data))
