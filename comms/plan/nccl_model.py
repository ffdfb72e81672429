"""Predicts what NCCL's collectives cost by NCCL's own model: latencies and bandwidths of ring, tree, NVLS and NVLSTree.

NCCL chooses an algorithm and a protocol for every call by predicted microseconds. The figures and formulas of that
prediction are facts that NVIDIA publishes; with them a hierarchy of NCCL calls and one NCCL call are priced alike. A
time is `base + messages x latency + bytes / bandwidth`; a protocol trades one for the other: LL has the least latency
and half of the bandwidth, LL128 0.92 of it (NVLink only), Simple all of it.

What differs from NCCL, each time in favour of the one call over all ranks:

- the factors by which NCCL slows trees of medium sizes (treeCorrectionFactor) are left out;
- rates are the links' own, where NCCL rounds them down to the steps of its search.

And a tree is never faster than the bytes that it puts on the busiest NIC, which NCCL's formula for two or three nodes
can be. In-network reduction by InfiniBand switches (SHARP, CollNet) is left out: it has to be switched on.

Source: NCCL v2.30 src/graph/tuning.cc (constants, ncclTopoTuneModel, ncclTopoGetAlgoTime), src/graph/search.cc
(ncclTopoCompute, ncclTopoDupChannels: channels). Nothing of it has been measured by gradwire.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from gradwire.comms.plan.plan import ALL_REDUCE, NVLS, NVLS_TREE, RING, TREE, Phase
from gradwire.topology.cluster import Cluster, GpuFabric

LL, LL128, SIMPLE = 0, 1, 2
"""NCCL's protocols, as indices into the tables."""

BASE_SECONDS = {RING: (6.6e-6, 14.0e-6, 8.4e-6), TREE: (6.8e-6, 14.0e-6, 8.4e-6), "pat": (8.0e-6, 8.0e-6, 8.0e-6)}
"""Seconds of each call, whatever its size, by algorithm: with LL, LL128 and Simple (baseLatencies)."""

HOP_SECONDS = {
    "nvlink": {RING: (0.6e-6, 1.9e-6, 3.4e-6), TREE: (0.6e-6, 1.25e-6, 4.0e-6)},
    "pcie": {RING: (1.0e-6, 2.5e-6, 5.7e-6), TREE: (1.0e-6, 1.9e-6, 4.0e-6)},
    "network": {RING: (2.7e-6, 4.0e-6, 14.0e-6), TREE: (5.0e-6, 8.5e-6, 14.0e-6)},
}
"""Latency in seconds of a step from rank to rank, by link and algorithm: with LL, LL128 and Simple (hwLatencies). With
one GPU a node a ring's network steps cost a tree's."""

NVLS_SECONDS = 25.0e-6
"""Latency in seconds of in-network reduction inside a node, all steps (hwLatencies, NVLink, NVLS and NVLSTree)."""
NVLS_TREE_HOP_SECONDS = 20.9e-6
"""Latency in seconds of a step of NVLSTree between nodes (hwLatencies, network, NVLSTree)."""

NVLS_EFFICIENCY = {90: 0.85, 100: 0.74}
"""Part of NVLink's rate that in-network reduction reaches, by compute capability times ten (nvlsEfficiency)."""

LL_BYTES_PER_SECOND = {70: (39.0e9,), 80: (87.7e9,), 90: (141.0e9,), 100: (282.0e9,)}
"""Largest bytes per second of LL inside one node, by compute capability times ten (llMaxBws)."""
LL_BETWEEN_NODES = {False: (39.0e9, 20.4e9), True: (22.5e9, 19.0e9)}
"""Largest bytes per second of LL over 2 nodes and over more, with processors of AMD (True) or others (llMaxBws)."""

CHANNEL_RING_LL128 = {70: (20e9,) * 3, 80: (20e9,) * 3, 90: (36.7e9,) * 3, 100: (40e9,) * 3}
CHANNEL_TREE_LL128 = {
    70: (20e9, 20e9, 20e9),
    80: (20e9, 20e9, 20e9),
    90: (36.7e9, 36.7e9, 29e9),
    100: (55.6e9, 31.67e9, 20e9),
}
CHANNEL_TREE = {
    70: (26.5e9, 18.5e9, 10e9),
    80: (24e9, 23.6e9, 17.8e9),
    90: (38.7e9, 41.4e9, 36e9),
    100: (70e9, 42.8e9, 24e9),
}
CHANNEL_NVLS_TREE = {90: (57.7e9, 45.5e9), 100: (96e9, 80e9)}
"""Largest bytes per second of one channel on 1 node, on 2 and on more, by compute capability times ten
(perChMax...Bws); of NVLSTree on 2 and on more."""

TREE_SHARE, ONE_GPU_TREE_SHARE, LL_TREE_SHARE = 0.92, 0.85, 1 / 3.8
LL_SHARE, LL128_SHARE = 0.5, 0.92
LL128_TREE_SHARE = {True: 7 / 9, False: 120 / 128}
"""Parts of the bandwidth that are reached: by trees, by trees with one GPU a node (in addition), by the protocols; by
LL128's tree on one node (True) and on more."""

PLATEAU, PLATEAU_BEFORE_AMPERE, PLATEAU_NBYTES = 1.4, 1.9, 64
"""Factors on a ring's latency between nodes with Simple (from Ampere on, and before), and the number of bytes for each
rank and channel from which on they hold."""

PAT_SHARE, PAT_RANK_SECONDS, PAT_HOP_SHARE = 0.75, 2.8e-6, 1 / 3.5
"""PAT, NCCL's all-gather over ranks that are each alone on their node: part of the bandwidth that it reaches, seconds
for each rank, and part of a network step that each of its steps takes."""

POST_SECONDS = {False: 1e-6, True: 2e-6}
"""Seconds to post a message to the network, with processors of AMD (True) or others; a Simple step posts three."""

FASTEST_CHANNEL = {70: 40e9, 80: 40e9, 90: 60e9, 100: 90e9}
DOUBLED_CHANNEL, FEW_CHANNELS = 25e9, 4
"""Inside a node a channel carries at most this; a channel of 25 GB/s and more is doubled, from Hopper on where there
are few (speedArrayIntra, ncclTopoDupChannels)."""


class NcclModel:
    """NCCL's cost model for one cluster of GPUs.

    Args:
        cluster: Placement of the ranks; it has two levels and a `fabric`, which describes the GPUs' links.

    Attributes:
        fabric: The GPUs' links and capabilities.
        size: Number of ranks.
        nodes: Number of nodes.
        widest: Ranks of the largest node.
        per_node: Mean number of ranks of a node.
        inside: Bytes per second of one rank's link inside its node.
        outwards: Bytes per second of a node's link, all NICs together.

    Raises:
        ValueError: The cluster has another number of levels, or no fabric.
    """

    def __init__(self, cluster: Cluster) -> None:
        if cluster.fabric is None or cluster.depth != 2:
            raise ValueError(f"`cluster` has {cluster.depth} levels and fabric {cluster.fabric}; wanted 2 and one")
        self.fabric: GpuFabric = cluster.fabric
        self.size, self.nodes, self.widest = cluster.size, len(cluster.nodes), cluster.widest(0)
        self.per_node = self.size / self.nodes
        self.inside = cluster.levels[0].link.bytes_per_second
        link = cluster.levels[1].link
        self.outwards = link.rate(1, spread=True)
        self._nics = link.nics
        self._generation = max(
            (known for known in CHANNEL_TREE if known <= self.fabric.compute_capability), default=min(CHANNEL_TREE)
        )
        self._hop = HOP_SECONDS["nvlink" if self.fabric.nvlink else "pcie"]
        self._posted = POST_SECONDS[self.fabric.amd_cpu]

    def flat(self, nbytes: float) -> dict[str, float]:
        """Predicts one all-reduce over all ranks with each algorithm that NCCL has here.

        Args:
            nbytes: Bytes of the bucket.

        Returns:
            Name of the algorithm -> seconds with its best protocol.
        """
        if self.size == 1:
            return {RING: 0.0}
        found = {RING: self._ring(nbytes), TREE: self._tree(nbytes)}
        if self.fabric.nvls and self.nodes == 1:
            found[NVLS] = self._nvls(nbytes)
        if self.fabric.nvls and self.nodes > 1 and self.widest > 1:
            found[NVLS_TREE] = self._nvls_tree(nbytes)
        return found

    def best_flat(self, nbytes: float) -> tuple[str, float]:
        """Returns the algorithm that NCCL would choose for `nbytes` over all ranks, and its predicted seconds."""
        return min(self.flat(nbytes).items(), key=lambda item: item[1])

    def phase(self, phase: Phase, members: int, wire_seconds: float, nbytes: float) -> float:
        """Returns the predicted seconds of one phase of a hierarchical plan, which is an NCCL call in each group.

        Args:
            phase: An all_reduce between nodes, or a reduce_scatter or all_gather inside them.
            members: Number of ranks in the largest group.
            wire_seconds: Seconds that the busiest link needs at its full rate for the bytes of a ring.
            nbytes: Bytes that the busiest member sends.

        Raises:
            ValueError: The phase is another collective between nodes.
        """
        if members <= 1:
            return 0.0
        if phase.level == 0:
            return min(
                BASE_SECONDS[RING][protocol] + (members - 1) * self._hop[RING][protocol] + seconds
                for protocol, seconds in self._by_protocol(wire_seconds, nbytes, inside=True)
            )
        if phase.op != ALL_REDUCE:
            raise ValueError(f"`phase` is a {phase.op} between nodes; wanted an all_reduce")
        return self.all_reduce_between(members, wire_seconds, nbytes)

    def all_reduce_between(self, members: int, wire_seconds: float, nbytes: float) -> float:
        """Returns the predicted seconds of an all-reduce over one rank of each node: the faster of ring and tree.

        Args:
            members: Number of ranks.
            wire_seconds: Seconds that the busiest link needs at its full rate for the bytes of a ring.
            nbytes: Bytes that the busiest member sends in a ring.
        """
        steps, levels = 2 * (members - 1), math.floor(math.log2(members))
        channels = max(1, round(self._nics / self.per_node))
        plateau = nbytes * members / steps >= PLATEAU_NBYTES * channels * members
        rings, trees = [], []
        for protocol, seconds in self._by_protocol(wire_seconds, nbytes, inside=False):
            hop = self._network_hop(TREE, protocol)  # one rank a node: as NCCL, that of a tree
            latency = BASE_SECONDS[RING][protocol] + steps * hop
            if protocol == SIMPLE and plateau:
                latency *= self._plateau
            rings.append(latency + seconds)
            # A ring moves `steps` / `members` of the bytes that a tree counts once, halved: and never below the wire.
            share = TREE_SHARE * ONE_GPU_TREE_SHARE / (2 if members > 2 else 1)
            share *= {LL: LL_TREE_SHARE, LL128: LL128_TREE_SHARE[False], SIMPLE: 1.0}[protocol]
            moved = max(wire_seconds * members / steps / share, wire_seconds)
            trees.append(BASE_SECONDS[TREE][protocol] + 2 * levels * hop + moved)
        return min(*rings, *trees)

    def exchange(
        self,
        members: int,
        crossing: int,
        wire_seconds: float,
        nbytes: float,
        rounds: float = 2.0,
        *,
        by_links: bool = False,
    ) -> float:
        """Returns the predicted seconds of a compressed phase: an all_to_all of payloads, an all_gather of their sums.

        Args:
            members: Number of ranks that exchange.
            crossing: Number of a ring's steps that cross nodes; 0 if the ranks share a node.
            wire_seconds: Seconds that the busiest link needs at its full rate for the bytes of both collectives.
            nbytes: Bytes that the busiest member sends in both.
            rounds: Number of collectives; 2 are one all_to_all and one all_gather, others are proportional.
            by_links: Whether owners have unequal parts: then they send each rank their sums, as in an all_to_all. The
                host's time for launches is not included.
        """
        if members <= 1:
            return 0.0
        half, own = wire_seconds / 2, nbytes / 2
        sent = self.all_to_all(members, crossing, half)
        return rounds / 2 * (sent + (sent if by_links else self.gather(members, crossing, half, own)))

    def all_to_all(self, members: int, crossing: int, wire_seconds: float) -> float:
        """Returns the predicted seconds of an all_to_all.

        Args:
            members: Number of ranks.
            crossing: Number of a ring's steps that cross nodes; 0 if the ranks share a node.
            wire_seconds: Seconds that the busiest link needs at its full rate.
        """
        if members <= 1:
            return 0.0
        hop = self._network_hop(TREE, SIMPLE) if crossing else self._hop[RING][SIMPLE]
        return BASE_SECONDS[RING][SIMPLE] + hop + (members - 2) * self._posted + wire_seconds

    def gather(self, members: int, crossing: int, wire_seconds: float, nbytes: float) -> float:
        """Returns the predicted seconds of an all_gather or a reduce_scatter, which NCCL prices alike: ring or PAT.

        Args:
            members: Number of ranks.
            crossing: Number of a ring's steps that cross nodes; 0 if the ranks share a node.
            wire_seconds: Seconds that the busiest link needs at its full rate.
            nbytes: Bytes that the busiest member sends.
        """
        if members <= 1:
            return 0.0
        alone = crossing == members - 1
        gathers = []
        for protocol, seconds in self._by_protocol(wire_seconds, nbytes, inside=not crossing):
            inner = self._inner_hop(protocol) if crossing else self._hop[RING][protocol]
            outer = self._network_hop(TREE if alone else RING, protocol)
            latency = (members - 1 - crossing) * inner + crossing * outer
            gathers.append(BASE_SECONDS[RING][protocol] + latency + seconds)
        if crossing and alone:
            levels = math.floor(math.log2(members))
            latency = levels * self._network_hop("pat", SIMPLE) * PAT_HOP_SHARE + members * PAT_RANK_SECONDS
            gathers.append(BASE_SECONDS["pat"][SIMPLE] + latency + wire_seconds / PAT_SHARE)
        return min(gathers)

    def _by_protocol(self, wire_seconds: float, nbytes: float, *, inside: bool) -> Iterator[tuple[int, float]]:
        """Yields each protocol that NCCL may use, with the seconds that it needs for the bytes, without latency.

        Args:
            wire_seconds: Seconds that the busiest link needs at its full rate.
            nbytes: Bytes that the busiest member sends.
            inside: Whether the ranks share a node.
        """
        yield LL, max(wire_seconds / LL_SHARE, nbytes / self._most_ll(inside=inside))
        if self.fabric.ll128 if not inside else self.fabric.nvlink:
            yield LL128, wire_seconds / LL128_SHARE
        yield SIMPLE, wire_seconds

    def _ring(self, nbytes: float) -> float:
        steps, crossing = 2 * (self.size - 1), 2 * (self.nodes - 1)
        several = self.nodes > 1
        rate = min(self.inside, self.outwards) if several and self.widest > 1 else self._only_rate()
        channels = self._channels()
        times = []
        for protocol in self._protocols():
            bus = {
                LL: min(rate * LL_SHARE, self._most_ll(inside=not several)),
                LL128: min(rate * LL128_SHARE, channels * self._limit(CHANNEL_RING_LL128)),
                SIMPLE: rate,
            }[protocol]
            latency = BASE_SECONDS[RING][protocol]
            if several:
                hop = self._network_hop(RING if self.per_node > 1 else TREE, protocol)
                latency += (steps - crossing) * self._inner_hop(protocol) + crossing * hop
                if protocol == SIMPLE and nbytes >= PLATEAU_NBYTES * channels * self.size:
                    latency *= self._plateau
            else:
                latency += steps * self._hop[RING][protocol]
            times.append(latency + nbytes * steps / self.size / bus)
        return min(times)

    def _tree(self, nbytes: float) -> float:
        several, channels = self.nodes > 1, self._channels()
        rate = self._only_rate()
        if several and self.widest > 1:
            rate = min(self.outwards * (2 if self.nodes == 2 else 1), self.inside)
        elif several and self.nodes == 2:
            rate *= 2
        times = []
        for protocol in self._protocols():
            bus = min(rate * TREE_SHARE, channels * self._limit(CHANNEL_TREE))
            if protocol == LL:
                bus = min(bus * LL_TREE_SHARE, self._most_ll(inside=not several))
            if protocol == LL128:
                bus = min(bus * LL128_TREE_SHARE[not several], channels * self._limit(CHANNEL_TREE_LL128))
            bus *= ONE_GPU_TREE_SHARE if self.widest == 1 else 1.0
            latency = BASE_SECONDS[TREE][protocol] + 2 * (self.per_node - 1) * self._hop[TREE][protocol]
            if several:
                latency += 2 * math.floor(math.log2(self.nodes)) * self._network_hop(TREE, protocol)
            times.append(latency + max(nbytes / (bus / 2), self._tree_wire(nbytes)))
        return min(times)

    def _nvls(self, nbytes: float) -> float:
        rate = min(self._nvls_rate(), self.widest * FASTEST_CHANNEL[self._generation])
        return NVLS_SECONDS + nbytes * 2 * (self.size - 1) / self.size / rate

    def _nvls_tree(self, nbytes: float) -> float:
        heads = self.widest
        limit = CHANNEL_NVLS_TREE[max(known for known in CHANNEL_NVLS_TREE if known <= self._generation)]
        rate = min(
            self._nvls_rate(), self.outwards * (2 if self.nodes == 2 else 1), heads * limit[0 if self.nodes == 2 else 1]
        )
        hop = NVLS_TREE_HOP_SECONDS + self._flushes(SIMPLE) * self.fabric.network_seconds
        latency = NVLS_SECONDS + 2 * math.floor(math.log2(self.nodes)) * hop
        return latency + max(nbytes * 2 * (self.size - 1) / self.size / rate, self._tree_wire(nbytes))

    def _nvls_rate(self) -> float:
        """Returns the bus bandwidth of NVLS in bytes per second: reduction and broadcast in the NVSwitch overlap.

        The bus bandwidth is the rate at which each rank of a ring would have to send to be as fast. It is twice the
        rate of NVLink that NVLS reaches, because both operations run at once, times (n - 1) / n with n ranks on a node,
        because NCCL counts one channel of n as spent.
        """
        efficiency = NVLS_EFFICIENCY[max(known for known in NVLS_EFFICIENCY if known <= self._generation)]
        return 2 * self.inside * efficiency * (self.widest - 1) / self.widest

    def _tree_wire(self, nbytes: float) -> float:
        """Returns the seconds that the busiest NIC needs at its full rate for a double binary tree of `nbytes`."""
        return 0.0 if self.nodes == 1 else nbytes * min(2.0, self.nodes / 2) / self.outwards

    def _protocols(self) -> Iterator[int]:
        yield LL
        if self.fabric.nvlink and (self.nodes == 1 or self.fabric.ll128):
            yield LL128
        yield SIMPLE

    def _only_rate(self) -> float:
        """Returns the link rate of a call that uses one kind of links: inside one node, or else between nodes."""
        return self.inside if self.nodes == 1 else self.outwards

    def _most_ll(self, *, inside: bool) -> float:
        if inside:
            return LL_BYTES_PER_SECOND[self._generation][0]
        return LL_BETWEEN_NODES[self.fabric.amd_cpu][0 if self.nodes == 2 else 1]

    def _limit(self, table: Mapping[int, tuple[float, ...]]) -> float:
        return table[self._generation][min(self.nodes, 3) - 1]

    def _channels(self) -> int:
        if self.nodes == 1:
            return max(1, math.floor(self.inside / FASTEST_CHANNEL[self._generation]) * 2)
        single = self.outwards / self._nics
        doubled = single >= DOUBLED_CHANNEL and (self._generation <= 80 or self._nics <= FEW_CHANNELS)
        return self._nics * (2 if doubled else 1)

    def _inner_hop(self, protocol: int) -> float:
        """Returns the seconds of latency that one step inside a node adds to a ring that also crosses nodes.

        It is the larger of NVLink's or PCIe's latency and of the time in which the node's CPU posts a network message;
        three times that with the protocol Simple. As in NCCL, steps inside a node overlap with posting for the network.

        Args:
            protocol: `LL`, `LL128` or `SIMPLE`.
        """
        return max(self._hop[RING][protocol], self._posted * (3 if protocol == SIMPLE else 1))

    def _network_hop(self, algorithm: str, protocol: int) -> float:
        """Returns the latency in seconds of a step between nodes; Simple adds the network's once more for its flush."""
        table = HOP_SECONDS["network"][TREE if algorithm == "pat" else algorithm]
        return table[protocol] + self.fabric.network_seconds * self._flushes(protocol)

    def _flushes(self, protocol: int) -> int:
        return 2 if protocol == SIMPLE and self.fabric.network != "tcp" else 1

    @property
    def _plateau(self) -> float:
        return PLATEAU if self.fabric.compute_capability >= 80 else PLATEAU_BEFORE_AMPERE


@lru_cache(maxsize=64)
def nccl_model(cluster: Cluster) -> NcclModel:
    """Returns NCCL's model of a cluster, made once.

    Args:
        cluster: Placement of the ranks, and link rates.

    Raises:
        ValueError: It has no fabric, or any number of levels but two.
    """
    return NcclModel(cluster)
