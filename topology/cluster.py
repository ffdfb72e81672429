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
    """What one message costs: alpha seconds, and beta = 1 / bytes_per_second for each byte, in one direction.

    Attributes:
        alpha_seconds: For each message.
        bytes_per_second: What the unit sends at most, over all its cards together.
        nics: Network cards that share that bandwidth equally; one flow goes through one of them.
        channels: Flows that one sender opens to its neighbour: gloo 1, NCCL about two for each card.
        stream_bytes_per_second: What one flow can carry, whatever the card does: a TCP stream on a fast card.
        gap_seconds: What each further chunk takes of the processor, all its phases together, while alpha passes unseen
            behind other chunks; None: not known, and alpha keeps the link.
        ring_share: Part of the bandwidth that one ring over all ranks reaches: inside a node it goes through sockets.
        exchange_share: Part of the bandwidth that a lone exchange of payloads (all_to_all, then all_gather) reaches:
            each of its two rounds waits for the last message.
        exchange_gap_share: Part of such an exchange that keeps the link; other chunks fill the rest.
        exchange_alpha_seconds: For each message of such an exchange; None: as for any other.
        on_processor: Whether the processor itself moves the bytes (shared memory), which cannot encode meanwhile.
        sender_nics: Cards that one sender reaches, those near its GPU; None: as many as it has flows. A ring or tree
            over all ranks crosses through every GPU in turn and reaches all cards (`spread`).
        presumed: Whether nobody has published, given or measured these figures.
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
        """Time for `messages` messages after one another that carry `nbytes` in all, cards and flows all in use."""
        return messages * self.alpha_seconds + nbytes / self.bytes_per_second

    def rate(self, senders: float, *, spread: bool = False) -> float:
        """Bytes per second that a unit reaches when `senders` of its ranks send at once.

        Args:
            senders: How many.
            spread: Whether each channel leaves through another rank, as those of a collective over all ranks do.
        """
        flows = senders * self.channels
        cards = flows if self.sender_nics is None or spread else min(flows, senders * self.sender_nics)
        return min(self.bytes_per_second * min(1.0, cards / self.nics), flows * self.stream_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Level:
    """One ring of the hierarchy.

    At level 0 the link is what one rank has inside its node; at every other level it is what one whole unit (node,
    rack, region) has towards the others, shared by all the ranks inside.
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
        """The link of one unit, by its place in `Cluster.units(level - 1)`."""
        return replace(self.link, bytes_per_second=self.unit_rates[unit]) if self.unit_rates else self.link

    def with_rates(self, rates: Sequence[float]) -> "Level":
        """The same level, its units with these rates in bytes per second; of rates that are all equal only one stays.

        Args:
            rates: One for each unit, in the order of `Cluster.units(level - 1)`.
        """
        link = replace(self.link, bytes_per_second=min(rates))
        return replace(self, link=link, unit_rates=tuple(rates) if len(set(rates)) > 1 else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """What NCCL's own cost model asks about GPUs and networks, beside the rates of the links.

    Attributes:
        compute_capability: Of the oldest GPU: 80 for A100, 90 for H100.
        nvlink: Whether NVLink joins all GPUs of a node; else they use PCIe.
        nvls: Whether the node's NVSwitch sums (NVLink SHARP; Hopper and later).
        ll128: Whether NCCL lets its protocol LL128 through the network: the card is near the GPU.
        amd_cpu: Whether the processors are AMD's, for which NCCL counts twice the time to post a message.
        network: `infiniband`, `roce`, `efa`, `slingshot` or `tcp`.
        network_seconds: What a message over this network takes more than over InfiniBand.
        memory_bytes_per_second: Peak bandwidth of the memory of the slowest GPU.
    """

    compute_capability: int
    nvlink: bool
    nvls: bool
    ll128: bool
    amd_cpu: bool
    network: str
    network_seconds: float
    memory_bytes_per_second: float


@dataclass(frozen=True)
class Cluster:
    """Where each rank is.

    What follows from the locations is worked out once for each object: planning asks for it thousands of times, and
    with 16,384 ranks each answer, and each hash, would take a millisecond.

    Attributes:
        locations: For each rank the unit it is in at every level above the first, outermost first: `(node,)` in a
            cluster of two levels, `(rack, node)` in one of three. Node numbers are unique inside their rack.
        levels: Innermost first; one more than the length of a location.
        fabric: Of GPUs on two levels whose links are known but not measured: collectives are then priced as NCCL prices
            its own. None: by the links alone.
        equal_sums: Whether exact sums have owners of equal parts however the units' links differ, as NCCL's have: then
            compressors' payloads alone go to owners by their links.
        nvls_possible: Whether some rank's GPU is one whose NVSwitch can sum (NVIDIA, Hopper or later), whatever is
            known of the switches: a container may hide them.
    """

    locations: tuple[tuple[int, ...], ...]
    levels: tuple[Level, ...]
    fabric: GpuFabric | None = None
    equal_sums: bool = False
    nvls_possible: bool = False

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
        """Number of ranks."""
        return len(self.locations)

    @property
    def depth(self) -> int:
        """Number of levels."""
        return len(self.levels)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, innermost first."""
        return tuple(level.name for level in self.levels)

    def unit(self, rank: int, level: int) -> tuple[int, ...]:
        """The unit of `level` that `rank` is in: its node at level 0, its rack at level 1, () at the top."""
        return self.locations[rank][: self.depth - 1 - level]

    def units(self, level: int) -> tuple[tuple[int, ...], ...]:
        """All units of a level, in the order of their lowest rank."""
        return tuple(dict.fromkeys(self.unit(rank, level) for rank in range(self.size)))

    def ranks(self, unit: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks in a unit, ascending."""
        return tuple(rank for rank, location in enumerate(self.locations) if location[: len(unit)] == unit)

    def children(self) -> Mapping[tuple[int, Unit], tuple[Unit, ...]]:
        """What each unit is made of: `(level, unit)` -> units of the level below, `(rank,)` for each rank of a node.

        Both in the order of their lowest rank. Read-only: it is worked out once for each set of locations.
        """
        return self._children

    @cached_property
    def _children(self) -> Mapping[tuple[int, Unit], tuple[Unit, ...]]:
        return _children(self.locations)

    @cached_property
    def _widest(self) -> tuple[int, ...]:
        return _widest(self.locations)

    def widest(self, level: int) -> int:
        """Children of the largest unit of a level: the most ranks in a node at level 0."""
        return self._widest[level]

    @cached_property
    def wide_levels(self) -> tuple[int, ...]:
        """The levels in use, ascending: those with units of several children."""
        return tuple(level for level, widest in enumerate(self._widest) if widest > 1)

    @property
    def outermost(self) -> int:
        """The highest level in use; 0 where there is none."""
        return max(self.wide_levels, default=0)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, nodes in the order of their lowest rank."""
        return tuple(tuple(rank for (rank,) in below) for (level, _), below in self._children.items() if level == 0)

    def node_rank(self, rank: int) -> int:
        """Index into `nodes` of the node that `rank` is in."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)

    def share_a_node(self, members: Iterable[int]) -> bool:
        """Whether some ranks are all on one node."""
        return len({self.unit(rank, 0) for rank in members}) == 1

    def all_apart(self, members: Sequence[int]) -> bool:
        """Whether no two of some ranks are on one node."""
        return len({self.unit(rank, 0) for rank in members}) == len(members)

    def sums_in_switch(self, members: Sequence[int]) -> bool:
        """Whether NVSwitches may sum for some ranks: inside the one node of all, or inside each of several.

        True also if nothing rules them out: a pass over the bucket costs less than a ring in the place of the switch.
        """
        known = self.fabric is not None and self.fabric.nvls
        return (known or self.nvls_possible) and not self.all_apart(members)

    def describe(self) -> str:
        """One line: `2 nodes x 4 ranks`, `3 nodes of 3, 3 and 1 ranks`."""
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
    """A cluster whose units of a level are all alike and whose ranks are contiguous.

    Args:
        counts: Ranks a node, nodes a rack, racks a region, ...: innermost first, one for each level.
        levels: Innermost first.
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
