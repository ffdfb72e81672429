"""The cost model: alpha-beta seconds of a phase, bytes that leave each unit, and the effect of a compressor.

Notation: a unit at level l - 1 (a rank, a node, a rack) has one link towards its siblings at level l. A message of b
bytes over it costs `alpha + b / bytes_per_second`. Formulas for one region of S bytes over m children:

    reduce_scatter, all_gather   (m - 1) messages, S (1 - 1/m) bytes out of every child
    reduce, broadcast            (m - 1) messages down a chain, S bytes out of every child but its last
    all_reduce (ring)            2 (m - 1) messages, 2 S (m - 1)/m bytes out of every child
    flat ring over n ranks       2 (n - 1) messages, 2 S (n - 1)/n bytes over every edge of the ring; a unit sends as
                                 many times that as edges leave it

The flat algorithms of other libraries are in `algorithms.py`.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009 (ring);
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import MappingProxyType

import numpy as np

from gradwire.comms.plan.algorithms import Messages, flat_messages
from gradwire.comms.plan.plan import ALL_REDUCE, REDUCE_SCATTER, RING, Phase
from gradwire.comms.plan.schedule import child_shares
from gradwire.comms.plan.traffic import Egress, Floats, Ints, shape_of, sole_owner
from gradwire.topology.cluster import Cluster

EXCHANGE_ROUNDS = 2
"""Collectives of most compressors: an all_to_all of payloads, and an all_gather of the owners' reduced payloads."""


@dataclass(frozen=True, slots=True)
class CodecPrice:
    """Cost of a compressor for the phase that it compresses.

    Attributes:
        name: Name of the compressor; `none` for exact sums.
        ratio: Bytes on the wire divided by those of an exact all-reduce of the same shard.
        seconds_per_byte: Seconds of encoding and decoding on one rank for each byte of the shard.
        call_seconds: Seconds for each shard, independent of its size.
        rounds: Number of collectives that follow one another: 2 for an all_to_all and an all_gather, and for a ring.
        exchanged: Whether payloads go from every rank to every rank instead of around a ring.
        owned: Part of the bytes that goes to owners as payloads and comes back from them. If exact sums have equal
            parts (`Cluster.equal_sums`), the rest has them too.
    """

    name: str
    ratio: float = 1.0
    seconds_per_byte: float = 0.0
    call_seconds: float = 0.0
    rounds: int = EXCHANGE_ROUNDS
    exchanged: bool = True
    owned: float = 1.0

    def seconds(self, nbytes: float) -> float:
        """Returns the seconds of encoding and decoding one shard of `nbytes` on one rank."""
        return self.call_seconds + self.seconds_per_byte * nbytes


EXACT = CodecPrice("none")
"""Cost of a phase without a compressor."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Predicted cost of one phase, linear in the size of the bucket: the alpha-beta model.

    Attributes:
        alpha_seconds: Sum of the latencies of the messages that follow one another.
        seconds_per_byte: Time on the slowest link for each byte of the bucket.
        egress: Bytes that leave each rank, node and rack for each byte of the bucket.
        byte_share: Part of that time, 0 to 1, in which the phase occupies the link; other chunks use the rest.
    """

    alpha_seconds: float
    seconds_per_byte: float
    egress: Egress
    byte_share: float = 1.0

    def seconds(self, nbytes: float) -> float:
        """Returns the predicted seconds of the phase for a bucket of `nbytes` bytes, latency included."""
        return self.alpha_seconds + self.byte_seconds(nbytes)

    def byte_seconds(self, nbytes: float) -> float:
        """Returns the predicted seconds of the phase for a bucket of `nbytes` bytes, without latency."""
        return nbytes * self.seconds_per_byte


def mixed_cost(one: PhaseCost, other: PhaseCost, part: float) -> PhaseCost:
    """Returns the cost of a phase that sends a part of its bytes one way and the rest another way.

    Args:
        one: Cost if all bytes went the first way.
        other: Cost if all went the other way, with the same number of messages.
        part: Part of the bytes that goes the first way, 0 to 1.
    """
    nbytes = tuple(
        part * own + (1 - part) * rest for own, rest in zip(one.egress.nbytes, other.egress.nbytes, strict=True)
    )
    per_byte = part * one.seconds_per_byte + (1 - part) * other.seconds_per_byte
    busy = part * one.seconds_per_byte * one.byte_share + (1 - part) * other.seconds_per_byte * other.byte_share
    egress = replace(one.egress, nbytes=nbytes)
    return replace(one, seconds_per_byte=per_byte, egress=egress, byte_share=busy / per_byte if per_byte else 1.0)


class CostModel:
    """Predicts the cost of the phases of one plan on one cluster.

    Args:
        cluster: Placement of the ranks, and link rates.
        parts: Number of shards that a region is cut into, for each level with a reduce_scatter.
        part_shares: Weights of those shards, for levels on which they are not equal.
    """

    def __init__(
        self,
        cluster: Cluster,
        parts: Mapping[int, int],
        part_shares: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.cluster = cluster
        self.parts = parts
        self.part_shares = part_shares
        self._shape = shape_of(cluster)

    @classmethod
    def of(cls, cluster: Cluster, phases: Iterable[Phase]) -> "CostModel":
        """Makes the model for the phases of one plan."""
        scatters = [phase for phase in phases if phase.op == REDUCE_SCATTER]
        parts = {phase.level: phase.parts for phase in scatters}
        return cls(cluster, parts, {phase.level: phase.shares for phase in scatters if phase.shares})

    def phase(self, phase: Phase) -> PhaseCost:
        """Predicts one exact phase: the latency of its messages, the slowest link's seconds, and each unit's bytes.

        A compressor of the phase is ignored; `compressed_cost` of the planner adds it.

        Args:
            phase: A phase of the plan; one that is `whole` is priced by its algorithm over all ranks.

        Returns:
            Its cost, linear in the bytes of the whole bucket (not only of the phase's regions).
        """
        if phase.whole:
            return _whole(self.cluster, phase.algorithm)

        def sent(count: int) -> list[float]:
            shares = _owned(phase.parts, count, phase.shares)
            return [sent_nbytes(phase.op, 1.0, count, index, shares) for index in range(count)]

        messages = (self.cluster.widest(phase.level) - 1) * (2 if phase.op == ALL_REDUCE else 1)
        alpha = messages * self.cluster.levels[phase.level].link.alpha_seconds
        if phase.op == ALL_REDUCE and phase.shares:
            return self._between_unequal(phase, alpha)
        egress = self._booked(phase, self._shape.by_child(phase.level, sent))
        return PhaseCost(alpha, self.slowest(egress, spread=False), egress)

    def _booked(self, phase: Phase, sent: Floats) -> Egress:
        """Returns the bytes that leave each unit in a phase, for each byte of the bucket.

        Args:
            phase: The phase.
            sent: Bytes that each rank sends for each byte that it owns when the phase begins, 1-D.
        """
        everyone = np.arange(self.cluster.size)
        return self._shape.book(everyone, np.full_like(everyone, phase.level), sent * self.shares(phase.level))

    def _between_unequal(self, phase: Phase, alpha_seconds: float) -> PhaseCost:
        """Returns the cost of an all_reduce in which each unit sums a part of the bucket that suits its link rate.

        Each of its two stages, contributions to the owners of the parts and sums from them, ends with its slowest link.

        Args:
            phase: The phase, with `shares`.
            alpha_seconds: Sum of the latencies of its messages that follow one another.
        """
        counts, owned = self._shape.counts[phase.level], np.array(phase.shares, dtype=float)
        places, parents = self._shape.unit_ids[phase.level], self._shape.parents(phase.level)
        _, first = np.unique(places, return_index=True)  # The same for all ranks of a unit.
        total = np.bincount(parents[first], owned[first])[parents]
        fraction = np.divide(owned, total, out=1.0 / counts, where=total > 0)
        egress = self._booked(phase, 1 + (counts - 2) * fraction)
        stage = self._booked(phase, np.maximum(1 - fraction, (counts - 1) * fraction))
        busy, taken = self.slowest(egress, spread=False), 2 * self.slowest(stage, spread=False)
        return PhaseCost(alpha_seconds, taken, egress, min(1.0, busy / taken) if taken else 1.0)

    def shares(self, level: int) -> Floats:
        """Returns the part of the bucket that each rank owns when a phase of that level begins."""
        shares = np.ones(self.cluster.size)
        for below in range(level):
            fractions = partial(_fractions, self.parts.get(below, 1), self.part_shares.get(below, ()))
            shares *= self._shape.by_child(below, fractions)
        return shares

    def messages(self, messages: Messages, *, ring: bool = False, spread: bool = True) -> PhaseCost:
        """Returns the cost of messages that are all in flight together, for each byte of the bucket.

        Args:
            messages: Messages of all ranks.
            ring: Whether they go around one ring over all ranks, and so through sockets also inside nodes.
            spread: Whether channels leave a unit through different ranks; see `Link.rate`.
        """
        crossed = self._shape.crossings(messages.sources, messages.targets)
        egress = self._shape.book(messages.sources, crossed, messages.nbytes)
        alphas = np.array([level.link.alpha_seconds for level in self.cluster.levels])
        share = self.cluster.levels[-1].link.ring_share if ring else 1.0
        slowest = self.slowest(egress, spread=spread)
        return PhaseCost(messages.critical_seconds(alphas[crossed]), slowest / share, egress)

    def slowest(self, egress: Egress, *, spread: bool) -> float:
        """Returns the seconds of the slowest link, for each byte of the bucket.

        Args:
            egress: Bytes that leave each unit for each byte of the bucket.
            spread: Whether channels leave a unit through different ranks; see `Link.rate`.
        """
        slowest = 0.0
        for level, nbytes, senders in zip(self.cluster.levels, egress.nbytes, egress.senders, strict=True):
            if level.unit_rates:
                rates = [
                    level.link_of(unit).rate(max(int(count), 1), spread=spread) for unit, count in enumerate(senders)
                ]
                seconds = (float(sent) / rate for sent, rate in zip(nbytes, rates, strict=True) if sent)
                slowest = max(slowest, max(seconds, default=0.0))
                continue
            for count in np.flatnonzero(np.bincount(senders)[1:]) + 1:
                rate = level.link.rate(int(count), spread=spread)
                slowest = max(slowest, float(nbytes[senders == count].max()) / rate)
        return slowest


@lru_cache(maxsize=64)
def exchange_cost(cluster: Cluster) -> PhaseCost:
    """Returns the cost of an all_to_all and an all_gather over all ranks, for each byte of a rank's whole payload.

    Of that payload a rank sends (n - 1)/n in each of the two, with n ranks.
    """
    size, shape = cluster.size, shape_of(cluster)
    egress: list[Floats] = []
    senders: list[Ints] = []
    nodes = shape.unit_ids[1] if shape.depth > 1 else np.zeros(size, dtype=np.intp)
    for level, ids in enumerate(shape.unit_ids):
        if level == 0:
            inside = np.bincount(nodes)[nodes] - 1
            egress.append(2 * inside / size)
            senders.append((inside > 0).astype(np.intp))
            continue
        counts = np.bincount(ids)
        egress.append(2 * counts * (size - counts) / size)
        senders.append(np.where(counts < size, counts, 0))
    booked = Egress(tuple(egress), tuple(senders))
    alpha = max(level.link.alpha_seconds for level in cluster.levels)
    return PhaseCost(2 * (size - 1) * alpha, CostModel(cluster, {}).slowest(booked, spread=True), booked)


@lru_cache(maxsize=64)
def _whole(cluster: Cluster, algorithm: str) -> PhaseCost:
    """Returns the cost of a flat all-reduce, which joins all ranks; cached, because all plans share it.

    Args:
        cluster: Placement of the ranks, and link rates.
        algorithm: Algorithm of the library, as in `Phase.algorithm`.
    """
    model = CostModel(cluster, {})
    return model.messages(flat_messages(shape_of(cluster), algorithm), ring=algorithm == RING)


def busiest(cluster: Cluster, costs: Iterable[tuple[PhaseCost, float]]) -> dict[str, float]:
    """Returns the bytes that leave the busiest unit of each level in all phases together, by the name of the level.

    Args:
        cluster: Cluster of the costs.
        costs: Cost of each phase, and the size in bytes that it is for: of the bucket, or of the payloads.
    """
    priced = list(costs)
    most = {level.name: 0.0 for level in cluster.levels}
    for number, name in enumerate(most if priced else ()):
        most[name] = float(np.sum([nbytes * cost.egress.nbytes[number] for cost, nbytes in priced], axis=0).max())
    return most


def _fractions(parts: int, sizes: Sequence[int], count: int) -> list[float]:
    """Returns the part of a unit's regions that each of its children owns; the parts add up to 1.

    Args:
        parts: Number of regions.
        sizes: Weight of each region; empty if they are equal.
        count: Number of children.
    """
    shares = _owned(parts, count, sizes)
    return [(stop - start) / shares[-1] for start, stop in pairwise(shares)]


def _owned(parts: int, count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the bounds of what each child of a unit owns of its regions, `count + 1` ascending numbers from 0.

    Args:
        parts: Number of regions.
        count: Number of children.
        sizes: Weight of each region, in whose unit the bounds are; empty counts regions.
    """
    shares = child_shares(parts, count)
    if not sizes:
        return shares
    ends = tuple(accumulate(sizes, initial=0))
    return tuple(ends[share] for share in shares)


def sent_nbytes(op: str, nbytes: float, count: int, index: int, bounds: Sequence[int] = ()) -> float:
    """Returns the bytes that member `index` of `count` sends in one collective over `nbytes`.

    Args:
        op: `all_reduce`, `reduce_scatter` or `all_gather`.
        nbytes: Bytes of the region that the members share.
        count: Number of members.
        index: Index of the member.
        bounds: Bounds of the members' parts in any measure, `count + 1` entries; unused for an all_reduce.
    """
    if op == ALL_REDUCE:
        return 2 * (count - 1) / count * nbytes
    own = (bounds[index + 1] - bounds[index]) / bounds[-1] * nbytes
    if op == REDUCE_SCATTER:
        return nbytes - own
    owner = sole_owner(bounds)
    # A broadcast goes down a chain: all but its last member pass it on.
    if owner is not None:
        return 0.0 if (index + 1) % count == owner else nbytes
    return (count - 1) * own


def busiest_resource(phases: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Returns the resource that is busy longest, and its seconds; (0, 0.0) without phases.

    Args:
        phases: Resource (a level, or `PROCESSOR` of the planner) and seconds of each phase of one chunk. Phases on one
            resource do not overlap.
    """
    busy: dict[int, float] = {}
    for level, seconds in phases:
        busy[level] = busy.get(level, 0.0) + seconds
    return max(busy.items(), key=lambda item: item[1], default=(0, 0.0))
