"""Traffic of collectives: the bytes that leave each rank, node, rack and region.

All numbers are for one byte of the bucket: bytes are linear in the size of the bucket, so a plan of any size is
predicted by one multiplication. Arrays instead of loops keep a cluster of 16,384 ranks well below a second.
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
    """Bytes that leave each rank, node and rack through its outgoing link, for each byte of the bucket.

    Attributes:
        nbytes: Those bytes: for each level a 1-D array with an element for each unit below the level, which is a rank
            for level 0, a node for level 1, a rack for level 2.
        senders: Number of the unit's ranks that send over the link, in arrays of the same shapes.
    """

    nbytes: tuple[Floats, ...]
    senders: tuple[Ints, ...]

    def of_busiest_rank(self, level: int) -> float:
        """Returns the bytes that the busiest rank sends, for each byte of the bucket.

        Args:
            level: 0 for the link of the rank itself; above 0 for its equal part of what leaves its node.
        """
        if level == 0:
            return float(self.nbytes[0].max())
        leaving, senders = self.nbytes[1], self.senders[1]
        return float((leaving[senders > 0] / senders[senders > 0]).max(initial=0.0))


class Shape:
    """The placement of ranks as NumPy arrays, so that the bytes of many messages on each level's links are added fast.

    A unit is a rank (level 0), a node (level 1), a rack (level 2), and so on. Siblings are the units inside the same
    unit of the next level.

    Args:
        cluster: Placement of the ranks.

    Attributes:
        size: Number of ranks.
        depth: Number of levels.
        unit_ids: For each level, the number of each rank's unit, (size) int: the rank itself at level 0, its node at
            level 1. Units are numbered in the order of their lowest rank.
        places: For each level, the index of each rank's unit among its siblings, (size) int.
        counts: For each level, the number of those siblings, the unit itself included, (size) int.
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
        """Returns the number of each rank's unit of level `level + 1`, inside which its unit of `level` has siblings.

        All are 0 at the outermost level, where all units are siblings.
        """
        return self.unit_ids[level + 1] if level + 1 < self.depth else np.zeros(self.size, dtype=np.intp)

    def by_child(self, level: int, values: Callable[[int], Sequence[float]]) -> Floats:
        """Returns a value for each rank, chosen by its index among its siblings.

        Args:
            level: Level of the siblings, as this class numbers them: 0 for the ranks inside a node.
            values: Function from the number of siblings to a value for each of them.
        """
        found = np.zeros(self.size)
        for count in np.unique(self.counts[level]):
            alike = self.counts[level] == count
            found[alike] = np.array(values(int(count)), dtype=float)[self.places[level][alike]]
        return found

    def crossings(self, sources: Ints, targets: Ints) -> Ints:
        """Returns the highest level whose link each message uses; 0 inside a node.

        Args:
            sources: Sending rank of each message, 1-D.
            targets: Receiving rank of each message, 1-D.
        """
        crossed = np.zeros(len(sources), dtype=np.intp)
        for level in range(1, self.depth):
            crossed[self.unit_ids[level][sources] != self.unit_ids[level][targets]] = level
        return crossed

    def book(self, sources: Ints, crossed: Ints, nbytes: Floats) -> Egress:
        """Adds up, for each unit (rank, node, rack, ...), the bytes that messages send through its outgoing link.

        A message counts for the link of its sender's unit at every level from 1 to the highest that it crosses; one
        that stays inside a node counts for the sender's link of level 0 only. Messages of 0 bytes do not count.

        Args:
            sources: Sending rank of each message, 1-D.
            crossed: Highest level whose link each message uses, 1-D; see `crossings`.
            nbytes: Bytes of each message for one byte of the bucket, 1-D.

        Returns:
            For each level the bytes, and the number of ranks that send, of every unit below it.
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
    """Returns the bytes that leave the busiest unit of each level in some transfers together, by the name of the level.

    Slices are sent directly to their owner or from it, an all_reduce goes around a ring, a broadcast down a chain.

    Args:
        cluster: Placement of the ranks.
        transfers: Transfers of all ranks.
        element_nbytes: Bytes of an element on the wire.
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
    """Returns the index of the only member that owns anything, or None: such a transfer is a reduce or a broadcast."""
    return next(
        (
            index
            for index in range(len(bounds) - 1)
            if bounds[index] == bounds[0] and bounds[index + 1] == bounds[-1] > bounds[0]
        ),
        None,
    )


def _around(members: Ints, transfer: Transfer) -> tuple[Ints, Ints, Floats]:
    """Returns (sources, targets, elements) of the messages of a ring all_reduce, or of a broadcast down a chain."""
    count, numel = len(members), transfer.stop - transfer.start
    if transfer.op == ALL_REDUCE:
        return members, np.roll(members, -1), np.full(count, 2 * (count - 1) / count * numel)
    chain = np.roll(members, -(sole_owner(transfer.bounds) or 0))
    return chain[:-1], chain[1:], np.full(count - 1, float(numel))


def _exchanged(shape: Shape, members: Ints, owned: Floats, op: str) -> list[Floats]:
    """Returns the elements that leave each unit, by level, in a reduce_scatter or an all_gather without a ring.

    Args:
        shape: Placement of all ranks.
        members: Ranks that take part.
        owned: Number of elements that each member owns.
        op: `reduce_scatter` sends each slice directly to its owner, `all_gather` from it.
    """
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
    """Returns the arrays of a cluster, computed once."""
    return Shape(cluster)


def _among_siblings(parents: Ints) -> tuple[Ints, Ints]:
    """Returns the index of each child among the children of its parent, and their number, given the parent of each."""
    order = np.argsort(parents, kind="stable")
    counts = np.bincount(parents)
    starts = np.cumsum(counts) - counts
    places = np.empty(len(parents), dtype=np.intp)
    places[order] = np.arange(len(parents)) - starts[parents[order]]
    return places, counts[parents]
