"""Ranks on nodes, nodes in racks, racks in regions: the shape that a plan is made for."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

LEVEL_NAMES = ("intra_node", "inter_node", "inter_rack", "inter_region")
"""Names of the levels of a cluster, innermost first."""


Unit = tuple[int, ...]
"""A rank `(7,)` below level 0; above it the place of a node, rack or region, outermost number first."""


@dataclass(frozen=True, slots=True)
class Link:
    """Describes the cost of a message: alpha seconds, and beta = 1 / bytes_per_second for each byte, in one direction.

    Attributes:
        alpha_seconds: Fixed cost of a message in seconds, whatever its size.
        bytes_per_second: Highest rate at which the unit sends, over all its NICs together.
        nics: Number of NICs that share that bandwidth equally; one flow goes through one of them.
        channels: Number of flows that one sender opens to its neighbour: gloo 1, NCCL about two for each NIC.
        stream_bytes_per_second: Highest rate of a single flow, however fast the NIC: a TCP stream on a fast NIC.
        gap_seconds: Seconds of processor time that each further chunk takes, all its phases together, while its alpha
            is hidden behind other chunks. None: unknown, and the link is taken to be busy for alpha.
        ring_share: Fraction of the bandwidth that one ring over all ranks reaches: inside a node it goes through
            sockets.
        exchange_share: Fraction of the bandwidth that a lone exchange of payloads (all_to_all, then all_gather)
            reaches: each of its two rounds waits for the last message.
        exchange_gap_share: Fraction of such an exchange's time in which it occupies the link; other chunks use the
            rest.
        exchange_alpha_seconds: Fixed cost in seconds of a message of such an exchange; None means `alpha_seconds`.
        on_processor: True if the processor itself moves the bytes (shared memory) and cannot encode meanwhile.
        sender_nics: Number of NICs that one sender reaches, those near its GPU; None means as many as it has flows. A
            ring or tree over all ranks crosses through every GPU in turn and reaches all NICs (`spread`).
        presumed: True if these figures are assumptions: neither published, nor set by the user, nor measured.
        nvlink: True between hosts of one NVLink domain, which exchange over NVLink and use no NIC.

    Raises:
        ValueError: A time is negative or not finite, a rate or share is not above 0, or a number is below 1.
    """

    alpha_seconds: float
    bytes_per_second: float
    nics: int = 1
    channels: int = 1
    stream_bytes_per_second: float = math.inf
    gap_seconds: float | None = None
    ring_share: float = 1.0
    exchange_share: float = 1.0
    exchange_gap_share: float = 1.0
    exchange_alpha_seconds: float | None = None
    on_processor: bool = False
    sender_nics: int | None = None
    presumed: bool = False
    nvlink: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha_seconds", "gap_seconds", "exchange_alpha_seconds"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted a finite number >= 0")
        for name in (
            "bytes_per_second",
            "stream_bytes_per_second",
            "ring_share",
            "exchange_share",
            "exchange_gap_share",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted a number > 0")
        for name in ("nics", "channels", "sender_nics"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted a whole number of at least 1")

    def seconds(self, messages: float, nbytes: float) -> float:
        """Returns the seconds for a sequence of messages, with all NICs and flows in use.

        Args:
            messages: Number of messages, sent one after another.
            nbytes: Total bytes of all messages together.
        """
        return messages * self.alpha_seconds + nbytes / self.bytes_per_second

    def rate(self, senders: float, *, spread: bool = False) -> float:
        """Returns the bytes per second that a unit reaches when several of its ranks send at once.

        Args:
            senders: Number of ranks that send at the same time.
            spread: True if the channels leave the unit through different ranks, as in a collective over all ranks, so
                that `sender_nics` does not limit them.
        """
        flows = senders * self.channels
        cards = flows if self.sender_nics is None or spread else min(flows, senders * self.sender_nics)
        return min(self.bytes_per_second * min(1.0, cards / self.nics), flows * self.stream_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Level:
    """Describes one level of the hierarchy: its name and its link.

    At level 0 the link is what one rank has inside its node; at every other level it is what one whole unit (node,
    rack, region) has towards the others, shared by all the ranks inside.

    Attributes:
        name: One of `LEVEL_NAMES`.
        link: Costs of a message; where units differ, those of the slowest unit.

    Raises:
        ValueError: One of `unit_rates` is not a finite number above 0.
    """

    name: str
    link: Link
    unit_rates: tuple[float, ...] = ()
    """Bytes per second that each unit below sends, in the order of `Cluster.units(level - 1)`, where they are known to
    differ; the link's rate is then the least of them. Empty: all units are alike."""

    def __post_init__(self) -> None:
        if any(not 0 < rate < math.inf for rate in self.unit_rates):
            raise ValueError(f"`unit_rates` is {self.unit_rates}; wanted finite numbers > 0, in bytes per second")

    def link_of(self, unit: int) -> Link:
        """Returns the link of one unit, with that unit's own rate if the units differ.

        Args:
            unit: Index of the unit in `Cluster.units(level - 1)`.
        """
        return replace(self.link, bytes_per_second=self.unit_rates[unit]) if self.unit_rates else self.link

    def with_rates(self, rates: Sequence[float]) -> "Level":
        """Returns a copy of the level with measured or configured rates: its link gets the least of them.

        `unit_rates` gets all of them if they differ, and is empty if all are equal.

        Args:
            rates: Bytes per second of each unit, in the order of `Cluster.units(level - 1)`; not empty.

        Raises:
            ValueError: A rate is not above 0, or not finite where the rates differ.
        """
        link = replace(self.link, bytes_per_second=min(rates))
        return replace(self, link=link, unit_rates=tuple(rates) if len(set(rates)) > 1 else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """Describes the GPUs and the network of a node, as far as NCCL's own cost model depends on them.

    The rates of the links are in `Link`.

    Attributes:
        compute_capability: Compute capability of the oldest GPU times ten: 80 for A100, 90 for H100.
        nvlink: True if NVLink joins all GPUs of a node; else they use PCIe.
        nvls: True if the node's NVSwitch can sum (NVLink SHARP; Hopper and later).
        ll128: True if NCCL uses its LL128 protocol across the network, because the NIC is near the GPU.
        amd_cpu: True if the processors are AMD's, for which NCCL counts twice the time to post a message.
        network: Kind of network: `infiniband`, `roce`, `efa`, `slingshot`, `omnipath` or `tcp`.
        network_seconds: Latency in seconds that a message over this network has beyond one over InfiniBand.
    """

    compute_capability: int
    nvlink: bool
    nvls: bool
    ll128: bool
    amd_cpu: bool
    network: str
    network_seconds: float


@dataclass(frozen=True)
class Cluster:
    """Describes a cluster: the node, rack and region of each rank, and the links of each level.

    Everything derived from the locations is computed once per object: planning asks for it thousands of times, and
    with 16,384 ranks each answer, and each hash, would take a millisecond.

    Attributes:
        locations: One tuple for each rank: the unit it is in at every level above the first, outermost first: `(node,)`
            in a cluster of two levels, `(rack, node)` in one of three. Node numbers are unique inside their rack.
        levels: Levels from the innermost to the outermost; one more than a location has numbers.
        fabric: Properties of the GPUs and the network, from which collectives are priced with NCCL's own cost model.
            It is set only for GPUs in a cluster of two levels whose links are known but not measured. None: collectives
            are priced by `levels` alone.
        equal_sums: True if the owners of an exact all-reduce get equal parts even where the units' links differ, as
            NCCL does it. The owners of compressed payloads get parts in proportion to their links in either case.
        nvls_possible: True if some rank's GPU is one whose NVSwitch can sum (NVIDIA, Hopper or later), whether or not a
            switch was found: a container may hide it.
        memory_bytes_per_second: Peak bandwidth of the slowest GPU's memory; None on CPUs, and if one is unknown.

    Raises:
        ValueError: `locations` is empty, `levels` does not fit it, or a level has another number of `unit_rates` than
            there are units below it; level 0 may have none.
    """

    locations: tuple[tuple[int, ...], ...]
    levels: tuple[Level, ...]
    fabric: GpuFabric | None = None
    equal_sums: bool = False
    nvls_possible: bool = False
    memory_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if not self.locations:
            raise ValueError("`locations` is empty; wanted one location for each rank")
        lengths = {len(location) + 1 for location in self.locations}
        if lengths != {len(self.levels)}:
            raise ValueError(
                f"`levels` has {len(self.levels)} entries; wanted {sorted(lengths)}: "
                "one more than there are numbers in a rank's location"
            )
        for number, level in enumerate(self.levels):
            units = len(self.units(number - 1)) if level.unit_rates and number else 0
            if level.unit_rates and len(level.unit_rates) != units:
                raise ValueError(
                    f"`unit_rates` of level {level.name} has {len(level.unit_rates)} entries; wanted "
                    + (f"{units}: one for each unit" if number else "none: inside a node one rate serves all ranks")
                )

    def __hash__(self) -> int:
        return hash((self._hash_of_locations, self.levels, self.fabric, self.equal_sums, self.nvls_possible))

    def __getstate__(self) -> dict[str, object]:
        # Only the fields are pickled: the rest is worked out again, and hashes of strings differ between processes.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _hash_of_locations(self) -> int:
        return hash(self.locations)

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.locations)

    @property
    def depth(self) -> int:
        """Returns the number of levels."""
        return len(self.levels)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Returns the names of the levels, innermost first."""
        return tuple(level.name for level in self.levels)

    def unit(self, rank: int, level: int) -> tuple[int, ...]:
        """Returns the unit of a level that a rank is in: its node at level 0, its rack at level 1, () at the top."""
        return self.locations[rank][: self.depth - 1 - level]

    def units(self, level: int) -> tuple[tuple[int, ...], ...]:
        """Returns all units of a level, in the order of their lowest rank."""
        return tuple(dict.fromkeys(self.unit(rank, level) for rank in range(self.size)))

    def ranks(self, unit: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ranks in a unit, ascending."""
        return tuple(rank for rank, location in enumerate(self.locations) if location[: len(unit)] == unit)

    def children(self) -> Mapping[tuple[int, Unit], tuple[Unit, ...]]:
        """Returns the parts of every unit: `(level, unit)` -> its units of the level below, `(rank,)` in a node.

        Keys and values are in the order of their lowest rank. The mapping is read-only, and shared by all clusters with
        the same locations.
        """
        return self._children

    @cached_property
    def _children(self) -> Mapping[tuple[int, Unit], tuple[Unit, ...]]:
        return _children(self.locations)

    @cached_property
    def _widest(self) -> tuple[int, ...]:
        return _widest(self.locations)

    def widest(self, level: int) -> int:
        """Returns the number of children of the largest unit of a level: at level 0 the most ranks in one node."""
        return self._widest[level]

    @cached_property
    def wide_levels(self) -> tuple[int, ...]:
        """Returns the levels in use, ascending: those on which some unit has several children."""
        return tuple(level for level, widest in enumerate(self._widest) if widest > 1)

    @property
    def outermost(self) -> int:
        """Returns the highest level in use; 0 if none is."""
        return max(self.wide_levels, default=0)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of each node, nodes in the order of their lowest rank."""
        return tuple(tuple(rank for (rank,) in below) for (level, _), below in self._children.items() if level == 0)

    def node_rank(self, rank: int) -> int:
        """Returns the index in `nodes` of the node that a rank is in."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)

    def share_a_node(self, members: Iterable[int]) -> bool:
        """Returns whether all the given ranks are on one node."""
        return len({self.unit(rank, 0) for rank in members}) == 1

    def all_apart(self, members: Sequence[int]) -> bool:
        """Returns whether each of the given ranks is on a node of its own."""
        return len({self.unit(rank, 0) for rank in members}) == len(members)

    def sums_in_switch(self, members: Sequence[int]) -> bool:
        """Returns whether NVSwitches may do the sums inside the nodes of the given ranks.

        True also if switches are merely possible (`nvls_possible`): an unneeded pass over the bucket costs less than a
        ring where a switch could have summed. False if no switch joins two of the ranks, because each is on a node of
        its own. Nodes that NVLink joins (`Link.nvlink`) count as one.
        """
        known = self.fabric is not None and self.fabric.nvls
        joined = max((number for number, level in enumerate(self.levels) if level.link.nvlink), default=0)
        return (known or self.nvls_possible) and len({self.unit(rank, joined) for rank in members}) < len(members)

    def describe(self) -> str:
        """Returns the cluster in one line: `2 nodes x 4 ranks`, `3 nodes of 3, 3, 1 ranks`."""
        counts = [len(ranks) for ranks in self.nodes]
        word = "node" if len(counts) == 1 else "nodes"
        if len(set(counts)) == 1:
            text = f"{len(counts)} {word} x {counts[0]} rank{'' if counts[0] == 1 else 's'}"
        else:
            text = f"{len(counts)} {word} of {', '.join(map(str, counts))} ranks"
        outer = [
            f"{len(self.units(level - 1))} {name}"
            for level, name in ((2, "racks"), (3, "regions"))
            if level < self.depth
        ]
        return ", ".join([text, *outer])


def uniform_cluster(counts: Sequence[int], levels: Sequence[Level]) -> Cluster:
    """Returns a cluster whose units of a level are all equal and whose ranks are contiguous.

    Args:
        counts: Ranks in a node, nodes in a rack, racks in a region, ...: innermost first, one number for each level.
        levels: Levels from the innermost to the outermost, as many as `counts` has numbers.

    Raises:
        ValueError: A count is below 1, or `levels` does not fit `counts`.
    """
    if any(count < 1 for count in counts):
        raise ValueError(f"`counts` is {tuple(counts)}; wanted whole numbers of at least 1")
    locations = []
    for rank in range(math.prod(counts)):
        rest, location = rank // counts[0], list[int]()
        for count in counts[1:]:
            location.insert(0, rest % count)
            rest //= count
        locations.append(tuple(location))
    return Cluster(tuple(locations), tuple(levels))


@lru_cache(maxsize=64)
def _children(locations: tuple[Unit, ...]) -> Mapping[tuple[int, Unit], tuple[Unit, ...]]:
    found: dict[tuple[int, Unit], dict[Unit, None]] = {}
    depth = len(locations[0]) + 1
    for rank, location in enumerate(locations):
        child: Unit = (rank,)
        for level in range(depth):
            unit = location[: depth - 1 - level]
            found.setdefault((level, unit), {})[child] = None
            child = unit
    return MappingProxyType({key: tuple(members) for key, members in found.items()})


@lru_cache(maxsize=64)
def _widest(locations: tuple[Unit, ...]) -> tuple[int, ...]:
    widest = [0] * (len(locations[0]) + 1)
    for (level, _), below in _children(locations).items():
        widest[level] = max(widest[level], len(below))
    return tuple(widest)
