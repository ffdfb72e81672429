"""What leaves each rank, node, rack and region: the bytes of a collective, booked on every link they pass.

Everything here is for one byte of bucket: bytes are linear in the bucket's size, so a plan of any size is priced by
one multiplication. Arrays instead of loops keep a cluster of 16,384 ranks well below a second.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, Transfer
from gradwire.topology.cluster import Cluster, Unit

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Egress:
    """Bytes that leave each unit through its link of one level, and how many ranks send them.

    Attributes:
        nbytes: For each level an array over the units below it: ranks at level 0, nodes at level 1, racks at level 2.
        senders: In the same shape, ranks of the unit that send over that link.
    """

    nbytes: tuple[Floats, ...]
    senders: tuple[Ints, ...]

    def of_busiest_rank(self, level: int) -> float:
        """What the busiest rank sends at one level of two; above level 0 its part of what leaves its node."""
        if level == 0:
            return float(self.nbytes[0].max())
        leaving, senders = self.nbytes[1], self.senders[1]
        return float((leaving[senders > 0] / senders[senders > 0]).max(initial=0.0))


class Shape:
    """A cluster as arrays.

    Attributes:
        unit_ids: For each level and rank the number of the unit below that level: the rank itself at level 0, its
            node at level 1; numbers in the order of the lowest rank.
        places: For each level and rank the place of that unit among its siblings.
        counts: For each level and rank how many siblings there are, itself included.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.size = cluster.size
        self.depth = cluster.depth
        self.unit_ids: list[Ints] = [np.arange(cluster.size)]
        for level in range(1, cluster.depth):
            numbers: dict[Unit, int] = {}
            depth = cluster.depth - level  # of the place of a unit below this level
            units = [numbers.setdefault(location[:depth], len(numbers)) for location in cluster.locations]
            self.unit_ids.append(np.array(units))
        self.places: list[Ints] = []
        self.counts: list[Ints] = []
        for level, ids in enumerate(self.unit_ids):
            parents = self.parents(level)
            _, first = np.unique(ids, return_index=True)
            place, count = _among_siblings(parents[first])
            self.places.append(place[ids])
            self.counts.append(count[ids])

    def parents(self, level: int) -> Ints:
        """The number, for each rank, of the unit in which the units below `level` are siblings."""
        return self.unit_ids[level + 1] if level + 1 < self.depth else np.zeros(self.size, dtype=np.intp)

    def by_child(self, level: int, values: Callable[[int], Sequence[float]]) -> Floats:
        """A value for each rank that depends on its place among the siblings at one level.

        Args:
            level: Of the siblings' parent: 0 for ranks inside a node.
            values: The number of siblings -> a value for each of them.
        """
        found = np.zeros(self.size)
        for count in np.unique(self.counts[level]):
            alike = self.counts[level] == count
            found[alike] = np.array(values(int(count)), dtype=float)[self.places[level][alike]]
        return found

    def crossings(self, sources: Ints, targets: Ints) -> Ints:
        """The highest level whose link each message takes; 0 inside a node."""
        crossed = np.zeros(len(sources), dtype=np.intp)
        for level in range(1, self.depth):
            crossed[self.unit_ids[level][sources] != self.unit_ids[level][targets]] = level
        return crossed

    def book(self, sources: Ints, crossed: Ints, nbytes: Floats) -> Egress:
        """Books messages on every link that they leave a unit by.

        Args:
            sources: The rank that sends each message.
            crossed: The highest level that it crosses.
            nbytes: Its bytes for one byte of bucket.
        """
        booked: list[Floats] = []
        senders: list[Ints] = []
        for level, ids in enumerate(self.unit_ids):
            passes = (crossed == 0) if level == 0 else (crossed >= level)
            passes &= nbytes > 0
            units = int(ids.max()) + 1
            booked.append(np.bincount(ids[sources[passes]], nbytes[passes], units).astype(np.float64))
            sends = np.zeros(self.size, dtype=bool)  # a mask: np.unique would sort or hash every message
            sends[sources[passes]] = True
            senders.append(np.bincount(ids[sends], minlength=units).astype(np.intp))
        return Egress(tuple(booked), tuple(senders))


def nbytes_by_level(cluster: Cluster, transfers: Iterable[Transfer], element_nbytes: int) -> dict[str, float]:
    """The bytes that leave each level's busiest unit in some transfers, all of them together, by the level's name.

    Slices travel straight to their owner or from it, an all_reduce around a ring, a broadcast down a chain.

    Args:
        cluster: Where the ranks are.
        transfers: Of all ranks.
        element_nbytes: Size of an element on the wire.
    """
    shape = shape_of(cluster)
    total = [np.zeros(int(ids.max()) + 1) for ids in shape.unit_ids]
    for transfer in transfers:
        members = np.array(transfer.members, dtype=np.intp)
        if transfer.op == ALL_REDUCE or (transfer.op == ALL_GATHER and sole_owner(transfer.bounds) is not None):
            sources, targets, numels = _around(members, transfer)
            booked = list(shape.book(sources, shape.crossings(sources, targets), numels).nbytes)
        else:
            booked = _exchanged(shape, members, np.diff(transfer.bounds).astype(float), transfer.op)
        for number, numel in enumerate(booked):
            total[number] += numel * element_nbytes
    return {level.name: float(nbytes.max()) for level, nbytes in zip(cluster.levels, total, strict=True)}


def sole_owner(bounds: Sequence[int]) -> int | None:
    """The member that owns everything, where there is one: a reduce or broadcast instead of a scatter or gather."""
    return next(
        (
            index
            for index in range(len(bounds) - 1)
            if bounds[index] == bounds[0] and bounds[index + 1] == bounds[-1] > bounds[0]
        ),
        None,
    )


def _around(members: Ints, transfer: Transfer) -> tuple[Ints, Ints, Floats]:
    """Messages around a ring (all_reduce), or down a chain from the owner (broadcast): sources, targets, elements."""
    count, numel = len(members), transfer.stop - transfer.start
    if transfer.op == ALL_REDUCE:
        return members, np.roll(members, -1), np.full(count, 2 * (count - 1) / count * numel)
    chain = np.roll(members, -(sole_owner(transfer.bounds) or 0))
    return chain[:-1], chain[1:], np.full(count - 1, float(numel))


def _exchanged(shape: Shape, members: Ints, owned: Floats, op: str) -> list[Floats]:
    """What leaves each unit where every member sends to (or, gathering, is sent by) the owner of each slice."""
    leaving: list[Floats] = []
    for level, ids in enumerate(shape.unit_ids):
        units = int(ids.max()) + 1
        if level == 0:  # inside a node, rank by rank
            nodes = shape.unit_ids[1][members] if shape.depth > 1 else np.zeros(len(members), dtype=np.intp)
            counts, sums = np.bincount(nodes)[nodes], np.bincount(nodes, owned)[nodes]
            sent = owned * (counts - 1) if op == ALL_GATHER else sums - owned
            leaving.append(np.bincount(members, sent, units).astype(np.float64))
            continue
        counts, sums = np.bincount(ids[members], minlength=units), np.bincount(ids[members], owned, units)
        others = sums * (len(members) - counts) if op == ALL_GATHER else counts * (owned.sum() - sums)
        leaving.append(others.astype(np.float64))
    return leaving


@lru_cache(maxsize=64)
def shape_of(cluster: Cluster) -> Shape:
    """The arrays of a cluster, worked out once."""
    return Shape(cluster)


def _among_siblings(parents: Ints) -> tuple[Ints, Ints]:
    """The place of each child, given the number of its parent, among the parent's children, and how many there are."""
    order = np.argsort(parents, kind="stable")
    counts = np.bincount(parents)
    starts = np.cumsum(counts) - counts
    places = np.empty(len(parents), dtype=np.intp)
    places[order] = np.arange(len(parents)) - starts[parents[order]]
    return places, counts[parents]
