"""Who shares a node with whom: every rank says through the store where it is, and reads what the others say.

Never computed from `rank // local_size`: nodes may be uneven, ranks dealt out round-robin, several jobs on one host.
Two ranks share a node when hostname, boot id and the device number of /dev/shm agree, so containers and emulated
nodes on one kernel are distinguished exactly where they cannot share memory.
"""

import contextlib
import hashlib
import json
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.hardware import Hardware, hardware
from gradwire.comms.config import Config, local_rank
from gradwire.topology.bandwidth import ALPHA_SECONDS
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, GpuFabric, Level, Link
from gradwire.topology.fabric import CHANNELS_PER_NIC, NETWORK_SECONDS, sender_nics

INTRA_NODE = Link(alpha_seconds=20e-6, bytes_per_second=5e9, presumed=True)
"""Inside a node where the topology does not say, until it is measured: shared memory of a small host."""

INTER_NODE = Link(alpha_seconds=100e-6, bytes_per_second=1.25e9, presumed=True)
"""Between nodes where the topology does not say, until it is measured: TCP over a 10 Gbit card."""


@dataclass(frozen=True, slots=True)
class Presence:
    """What a rank says about itself.

    Attributes:
        rank: Its rank in the group.
        size: The group's size as this rank knows it.
        host: Hostname, boot id and device number of /dev/shm.
        location: Names of the units above the node, outermost first.
        device: Type of the tensors it will reduce: `cpu` or `cuda`.
        torch_version: As `torch.__version__` says.
        hardware: What it knows of its machine: bytes per second inside and outwards, its NIC.
        shared: The configuration that must agree, field by field.
        nic_bytes_per_second: Of its node towards the others, where the configuration gives it.
        start: Drawn anew by every process, and for every exchange.
    """

    rank: int
    size: int
    host: tuple[str, ...]
    location: tuple[str, ...]
    device: str
    torch_version: str
    hardware: Hardware
    shared: dict[str, str]
    nic_bytes_per_second: float | None = None
    start: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def here(cls, rank: int, size: int, config: Config, device: torch.device) -> "Presence":
        """This process's."""
        return cls(
            rank,
            size,
            host_identity(config.hostname),
            config.location,
            device.type,
            torch.__version__,
            hardware(local_rank(), device.type),
            config.shared(),
            config.nic_bytes_per_second,
        )


def host_identity(hostname: str | None = None) -> tuple[str, str, str]:
    """Hostname (or the one given), boot id, device number of /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = Path("/dev/shm")
    return (
        hostname or socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        str(memory.stat().st_dev) if memory.exists() else "",
    )


LINGER_SECONDS = 2.0
"""For ranks that have found each other to read a presence; a rank of another world size may never ask for it."""

NAP_SECONDS = 0.005
"""Between two looks at what a rank that was restarted has left in the store."""


def exchange(store: Store, own: Presence, timeout: timedelta) -> list[Presence]:
    """Publishes this rank's presence and returns every rank's, in rank order.

    The store may still hold the presences of an earlier start (an elastic restart keeps it): a rank takes only those of
    processes that have seen its own, all of it the same on all ranks. What is put below `start_of(...)` is then nobody
    else's.

    Raises:
        RuntimeError: A rank did not join within the time-out; the message names those that are missing.
        ValueError: A rank has another world size, device, or configuration; the message names the field and both
            values. Raised on every rank.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(_key(own.rank), json.dumps(asdict(own)))
    while True:
        try:
            found = _read(store, own, timeout)
        except ValueError:
            _wait_until_all_refuse(store, own)
            raise
        starts = json.dumps([presence.start for presence in found])
        store.set(f"starts/{own.start}", starts)
        silent = [each.rank for each in found if not _agrees(store, each, starts, own)]
        if not silent:
            return found
        if time.monotonic() > deadline:
            raise _absent(own, silent, timeout)
        time.sleep(NAP_SECONDS)


def start_of(presences: Sequence[Presence]) -> str:
    """A name for this start of these ranks: the same on all of them, and another after a restart."""
    return hashlib.sha256("".join(presence.start for presence in presences).encode()).hexdigest()[:16]


def _wait_until_all_refuse(store: Store, own: Presence) -> None:
    """Keeps the process that serves the store here until the other ranks, too, have read what does not fit."""
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(RuntimeError):  # the server has left nevertheless: nothing more to wait for
        store.add("refusals", 1)
        while store.add("refusals", 0) < own.size and time.monotonic() < deadline:
            time.sleep(NAP_SECONDS)


def _agrees(store: Store, other: Presence, starts: str, own: Presence) -> bool:
    """Whether a process has seen the same presences as this one; one of an earlier start cannot have."""
    key = f"starts/{other.start}"
    return other.rank == own.rank or (store.check([key]) and store.get(key).decode() == starts)


def _absent(own: Presence, missing: Sequence[int], timeout: timedelta) -> RuntimeError:
    return RuntimeError(
        f"`world_size` is {own.size} on rank {own.rank}, but rank {_list(missing)} did not join within "
        f"{timeout.total_seconds():g} s: start all ranks, with the same world size"
    )


def _read(store: Store, own: Presence, timeout: timedelta) -> list[Presence]:
    found: list[Presence] = []
    missing: list[int] = []
    for rank in range(own.size):
        try:
            store.wait([_key(rank)], timeout if not missing else timedelta(milliseconds=10))
        except (RuntimeError, dist.DistStoreError):
            missing.append(rank)
            continue
        found.append(_parse(store.get(_key(rank))))
        _check(own, found[-1])
    if missing:
        raise _absent(own, missing, timeout)
    return found


def cluster_of(presences: Sequence[Presence], config: Config) -> Cluster:
    """Where each rank is, as a cluster with the links' default or configured speeds.

    For CUDA the links are those of NCCL: its latencies over NVLink, PCIe and the kind of network, the cards that the
    nodes' GPUs drive, and its fabric where all ranks know theirs. What the topology does not say is `presumed`.
    """
    depth = {len(presence.location) for presence in presences}
    if len(depth) > 1:
        raise ValueError(f"`location` has {sorted(depth)} names on different ranks; wanted the same number on all")
    numbers: dict[tuple[object, ...], int] = {}
    locations = []
    for presence in presences:
        outer = [_number(numbers, presence.location[: end + 1]) for end in range(len(presence.location))]
        locations.append((*outer, _number(numbers, (*presence.location, presence.host))))
    cluster = _with_links(locations, *_assumed(presences))
    if presences[0].device != "cuda":
        return with_node_rates(cluster, _node_rates(presences, cluster))
    fabric = _common([presence.hardware.fabric for presence in presences])
    cluster = _with_links(locations, *_of_gpus(presences, cluster, fabric, config))
    presumed = [level.name for number, level in enumerate(cluster.levels)
                if level.link.presumed and cluster.widest(number) > 1]  # fmt: skip
    return replace(cluster, fabric=None if presumed or cluster.depth != 2 else fabric)


def with_node_rates(cluster: Cluster, rates: Sequence[float]) -> Cluster:
    """The cluster, its nodes (and what they are in) with links of these rates.

    Args:
        cluster: Of any depth.
        rates: Bytes per second of each node, in the order of `cluster.units(0)`; empty leaves it as it is. A rack is
            taken to be as fast as the fastest of its nodes, a region likewise.
    """
    if not rates or cluster.depth == 1:
        return cluster
    known = dict(zip(cluster.units(0), rates, strict=True))
    levels = list(cluster.levels)
    for number in range(1, cluster.depth):
        levels[number] = levels[number].with_rates(
            [
                max(rate for node, rate in known.items() if node[: len(unit)] == unit)
                for unit in cluster.units(number - 1)
            ]
        )
    return replace(cluster, levels=tuple(levels))


def _node_rates(presences: Sequence[Presence], cluster: Cluster) -> list[float]:
    """What each node sends, as given, else as its topology says; empty where neither is known of all ranks."""
    given = [presence.nic_bytes_per_second for presence in presences]
    rates = given if None not in given else [presence.hardware.inter_node for presence in presences]
    known = [rate for rate in rates if rate is not None]
    return [min(known[rank] for rank in node) for node in cluster.nodes] if len(known) == len(rates) else []


def _with_links(locations: Sequence[tuple[int, ...]], intra: Link, inter: Link) -> Cluster:
    links = (intra, *[inter] * len(locations[0]))
    return Cluster(tuple(locations), tuple(map(Level, LEVEL_NAMES, links)))


def _assumed(presences: Sequence[Presence]) -> tuple[Link, Link]:
    """The links inside a node and between nodes, with the rates that are known."""
    inside = _slowest([presence.hardware.intra_node for presence in presences])
    outwards = _slowest([presence.nic_bytes_per_second for presence in presences]) or _slowest(
        [presence.hardware.inter_node for presence in presences]
    )
    return (
        INTRA_NODE if inside is None else replace(INTRA_NODE, bytes_per_second=inside, presumed=False),
        INTER_NODE if outwards is None else replace(INTER_NODE, bytes_per_second=outwards, presumed=False),
    )


def _of_gpus(
    presences: Sequence[Presence], cluster: Cluster, fabric: GpuFabric | None, config: Config
) -> tuple[Link, Link]:
    """The links as NCCL uses them: its latencies, and the cards that the ranks of the smallest node drive."""
    intra, inter = (level.link for level in cluster.levels[:2])
    intra = replace(intra, alpha_seconds=ALPHA_SECONDS["nvlink" if fabric is not None and fabric.nvlink else "pcie"])
    network = "tcp" if fabric is None else fabric.network
    inter = replace(inter, alpha_seconds=ALPHA_SECONDS["network"] + NETWORK_SECONDS[network])
    cards = [_cards(presences, node) for node in cluster.nodes]
    if any(count is None for count, _ in cards):
        return intra, inter
    count = min(count for count, _ in cards if count is not None)
    # Fewer ranks than GPUs drive fewer cards than the machine's rate is of; a rate that was given stands.
    share = min(share for _, share in cards) if config.nic_bytes_per_second is None else 1.0
    ranks = max(len(node) for node in cluster.nodes)
    return intra, replace(
        inter,
        bytes_per_second=inter.bytes_per_second * share,
        nics=count,
        channels=CHANNELS_PER_NIC * count,
        sender_nics=sender_nics(count, ranks),
    )


def _cards(presences: Sequence[Presence], node: Sequence[int]) -> tuple[int | None, float]:
    """Cards that the ranks of a node drive, None where that is unknown, and their share of the machine's."""
    ranks = [presences[rank].hardware for rank in node]
    every = min((each.nics for each in ranks if each.nics is not None), default=None)
    if every is None:
        return None, 1.0
    own = {each.nic for each in ranks}
    if None in own or len(own) >= every:
        return every, 1.0
    return len(own), len(own) / every


def _common(fabrics: Sequence[GpuFabric | None]) -> GpuFabric | None:
    """What all nodes have in common; None where one of them is not known."""
    known = [fabric for fabric in fabrics if fabric is not None]
    if len(known) < len(fabrics):
        return None
    slowest = max(known, key=lambda fabric: (fabric.network_seconds, fabric.network))
    return GpuFabric(
        compute_capability=min(fabric.compute_capability for fabric in known),
        nvlink=all(fabric.nvlink for fabric in known),
        nvls=all(fabric.nvls for fabric in known),
        ll128=all(fabric.ll128 for fabric in known),
        amd_cpu=any(fabric.amd_cpu for fabric in known),
        network=slowest.network,
        network_seconds=slowest.network_seconds,
    )


def _slowest(rates: Sequence[float | None]) -> float | None:
    """The least of the rates; None where one is unknown, because that one may be the least."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _number(numbers: dict[tuple[object, ...], int], name: tuple[object, ...]) -> int:
    return numbers.setdefault(name, len(numbers))


def _check(own: Presence, other: Presence) -> None:
    if own.size != other.size:
        _refuse("world_size", other, other.size, own, own.size)
    if own.device != other.device:
        _refuse("device", other, other.device, own, own.device)
    if (own.nic_bytes_per_second is None) != (other.nic_bytes_per_second is None):
        _refuse("nic_bytes_per_second", other, other.nic_bytes_per_second, own, own.nic_bytes_per_second)
    for name, value in own.shared.items():
        if other.shared.get(name) != value:
            _refuse(name, other, other.shared.get(name), own, value)


def _refuse(name: str, other: Presence, theirs: object, own: Presence, ours: object) -> None:
    raise ValueError(
        f"`{name}` is {theirs} on rank {other.rank} and {ours} on rank {own.rank}; wanted the same on all "
        "ranks: start them with one configuration"
    )


def _parse(text: bytes) -> Presence:
    values = json.loads(text)
    values["host"] = tuple(values["host"])
    values["location"] = tuple(values["location"])
    hardware, fabric = values["hardware"], values["hardware"]["fabric"]
    values["hardware"] = Hardware(
        **hardware | {"fastest": tuple(hardware["fastest"]), "fabric": GpuFabric(**fabric) if fabric else None}
    )
    return Presence(**values)


def _key(rank: int) -> str:
    return f"presence/{rank}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
