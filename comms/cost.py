"""What a phase costs on a cluster: alpha-beta seconds, and the bytes that leave each unit.

Notation: a unit at level l - 1 (a rank, a node, a rack) has one link towards its siblings at level l. A message of b
bytes over it costs `alpha + b / bytes_per_second`. Formulas for one region of S bytes over m children:

    reduce_scatter, all_gather   (m - 1) messages, S (1 - 1/m) bytes out of every child
    all_reduce (ring)            2 (m - 1) messages, 2 S (m - 1)/m bytes out of every child
    flat ring over n ranks       2 (n - 1) messages, 2 S (n - 1)/n bytes over every edge of the ring; a unit sends as
                                 many times that as edges leave it

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009 (ring);
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.comms.plan import ALL_REDUCE, REDUCE_SCATTER, Phase
from gradwire.comms.schedule import child_shares
from gradwire.topology.cluster import Cluster

Unit = tuple[int, ...]
Egress = dict[tuple[int, Unit], float]
"""`(level, unit)` -> bytes that leave the unit towards its siblings at that level or further; `(0, (rank,))` for what
a rank sends inside its node."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """What one phase costs for one bucket: predicted seconds, and the bytes that leave each unit."""

    seconds: float
    egress: Egress


class CostModel:
    """Costs of phases on one cluster.

    Args:
        cluster: Where the ranks are and what the links give.
        parts: For each level with a reduce_scatter, the shards that a region is cut into.
    """

    def __init__(self, cluster: Cluster, parts: Mapping[int, int]) -> None:
        self.cluster = cluster
        self.parts = parts
        self._children = cluster.children()

    def phase(self, phase: Phase, nbytes: float) -> PhaseCost:
        """Seconds and bytes of one phase for `nbytes` on the wire in place of the bucket."""
        if phase.whole:
            return self._flat_ring(nbytes)
        egress: Egress = {}
        messages = 0
        for (level, _), below in self._children.items():
            if level == phase.level and len(below) > 1:
                messages = max(messages, (len(below) - 1) * (2 if phase.op == ALL_REDUCE else 1))
                for index, child in enumerate(below):
                    sent = sent_nbytes(phase.op, nbytes, len(below), index, child_shares(phase.parts, len(below)))
                    self._charge(egress, level, child, sent)
        return PhaseCost(messages * self.cluster.levels[phase.level].link.alpha_seconds + self._slowest(egress), egress)

    def _charge(self, egress: Egress, level: int, unit: Unit, nbytes: float) -> None:
        """Books bytes on a unit's link, and on the links inside it that they pass on their way out."""
        egress[level, unit] = egress.get((level, unit), 0.0) + nbytes
        if level > 1:
            below = self._children[level - 1, unit]
            parts = self.parts.get(level - 1, 1)
            bounds = child_shares(parts, len(below))
            for index, child in enumerate(below):
                self._charge(egress, level - 1, child, nbytes * (bounds[index + 1] - bounds[index]) / parts)

    def _flat_ring(self, nbytes: float) -> PhaseCost:
        cluster, size = self.cluster, self.cluster.size
        edge_nbytes = 2 * (size - 1) / size * nbytes
        egress: Egress = {}
        alpha = 0.0
        for rank in range(size):
            crossed = cluster.crossing_level(rank, (rank + 1) % size)
            alpha += cluster.levels[crossed].link.alpha_seconds
            if crossed == 0:
                egress[0, (rank,)] = edge_nbytes
            for level in range(1, crossed + 1):
                unit = (level, cluster.unit(rank, level - 1))
                egress[unit] = egress.get(unit, 0.0) + edge_nbytes
        return PhaseCost(2 * (size - 1) / size * alpha + self._slowest(egress), egress)

    def _slowest(self, egress: Egress) -> float:
        return max((sent / self.cluster.levels[level].link.bytes_per_second for (level, _), sent in egress.items()),
                   default=0.0)


def busiest(cluster: Cluster, costs: Iterable[PhaseCost]) -> dict[str, float]:
    """For each level's name the bytes of the busiest unit over all phases."""
    total: Egress = {}
    for cost in costs:
        for key, nbytes in cost.egress.items():
            total[key] = total.get(key, 0.0) + nbytes
    return {level.name: max((nbytes for (index, _), nbytes in total.items() if index == number), default=0.0)
            for number, level in enumerate(cluster.levels)}


def sent_nbytes(op: str, nbytes: float, count: int, index: int, bounds: Sequence[int] = ()) -> float:
    """Bytes that member `index` of `count` sends in one collective over `nbytes`.

    Args:
        op: `all_reduce`, `reduce_scatter` or `all_gather`.
        nbytes: Bytes of the region that the members share.
        count: Members.
        index: Which one.
        bounds: Ownership in any unit (elements, regions), `count + 1` entries; not needed for an all_reduce.
    """
    if op == ALL_REDUCE:
        return 2 * (count - 1) / count * nbytes
    own = (bounds[index + 1] - bounds[index]) / bounds[-1] * nbytes
    return nbytes - own if op == REDUCE_SCATTER else (count - 1) * own


def pipelined_seconds(phases: Sequence[tuple[int, float]], chunks: int) -> float:
    """Time of `chunks` equal chunks through phases that overlap: the first one's way, then the busiest level.

    Phases on one level share its links, so they do not overlap with each other.

    Args:
        phases: Level and seconds of each phase, for one chunk.
        chunks: How many.
    """
    busy: dict[int, float] = {}
    for level, seconds in phases:
        busy[level] = busy.get(level, 0.0) + seconds
    return sum(busy.values()) + (chunks - 1) * max(busy.values(), default=0.0)
