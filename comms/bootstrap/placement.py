"""Who shares a node with whom: from what every rank says about itself (rendezvous.py has them say it).

Never computed from `rank // local_size`: nodes may be uneven, ranks dealt out round-robin, several jobs on one host.
Two ranks share a node when hostname, boot id and the device number of /dev/shm agree, so containers and emulated
nodes on one kernel are distinguished exactly where they cannot share memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gradwire.comms.bootstrap.kernel import host_identity, own_kernel
from gradwire.comms.boundary.messages import Addresses, Count, Kernel, Port, Rank
from gradwire.comms.config import Config
from gradwire.comms.environment import local_rank, visibility
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, GpuFabric, Level, Link
from gradwire.topology.host_summary import Hardware, host_summary

INTRA_NODE = Link(alpha_seconds=20e-6, bytes_per_second=5e9, presumed=True)
"""Link inside a node where the topology does not say, until it is measured: shared memory of a small host."""

INTER_NODE = Link(alpha_seconds=100e-6, bytes_per_second=1.25e9, presumed=True)
"""Link between nodes where the topology does not say, until it is measured: TCP over a 10 Gbit NIC."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
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
        port: Where it can be called; 0 where it cannot.
        addresses: Of its host, the best one first.
        kernel: That its process runs on; empty where it does not say.
        nvls_possible: Whether its GPU is one whose NVSwitch, if it has one, can sum.
    """

    rank: Rank
    size: Count
    host: tuple[str, ...]
    location: tuple[str, ...]
    device: str
    torch_version: str
    hardware: Hardware
    shared: dict[str, str]
    nic_bytes_per_second: float | None = None
    port: Port = 0
    addresses: Addresses = ()
    kernel: Kernel = ""
    nvls_possible: bool = False

    @classmethod
    def here(
        cls, rank: int, size: int, config: Config, device: torch.device, *, known: Hardware | None = None
    ) -> "PeerInfo":
        """This process's.

        Args:
            rank: See above.
            size: See above.
            config: What the user set.
            device: Where the gradients are.
            known: Of this machine; None reads its topology.
        """
        return cls(
            rank,
            size,
            host_identity(config.host),
            config.location,
            device.type,
            torch.__version__,
            known or hardware(local_rank(), device.type),
            config.shared(),
            config.nic_bytes_per_second,
            kernel=own_kernel(),
            nvls_possible=_nvls_possible(device),
        )


@lru_cache(maxsize=8)
def hardware(local_rank: int | None, device_type: str) -> Hardware:
    """Read this host's topology, once a process: bandwidth inside and outwards, and the nearest NIC. Measures nothing.

    Args:
        local_rank: Index of this rank on its host; None if the launcher did not set it.
        device_type: `cpu` or `cuda`: type of the gradients' device.
    """
    host = host_summary(local_rank, visibility())
    return host if device_type == "cuda" else replace(host, intra_node=None, fabric=None)


def cluster_of(infos: Sequence[PeerInfo], config: Config) -> Cluster:
    """Where each rank is, as a cluster with the links' default or configured speeds.

    For CUDA the links are those of NCCL: its latencies over NVLink, PCIe and the kind of network, the NICs that the
    nodes' GPUs drive, and its fabric where all ranks know theirs. What the topology does not say is `presumed`.
    """
    depth = {len(info.location) for info in infos}
    if len(depth) > 1:
        raise ValueError(
            f"`hostname` has {sorted(depth)} units before the name on different ranks; wanted the same number on all"
        )
    numbers: dict[tuple[object, ...], int] = {}
    locations = []
    for info in infos:
        outer = [_number(numbers, info.location[: end + 1]) for end in range(len(info.location))]
        locations.append((*outer, _number(numbers, (*info.location, info.host))))
    cluster = _with_links(locations, *_assumed(infos))
    if infos[0].device != "cuda":
        return with_node_rates(cluster, _node_rates(infos, cluster))
    fabric = _common([info.hardware.fabric for info in infos])
    cluster = _with_links(locations, *_of_gpus(infos, cluster, fabric, config))
    cluster = replace(with_node_rates(cluster, _node_rates(infos, cluster)), equal_sums=True)
    presumed = any(cluster.levels[number].link.presumed for number in cluster.wide_levels)
    nvls_possible = any(info.nvls_possible for info in infos)
    return replace(cluster, fabric=None if presumed or cluster.depth != 2 else fabric, nvls_possible=nvls_possible)


def _nvls_possible(device: torch.device) -> bool:
    """Whether a device's NVSwitch, if it has one, can sum."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    from gradwire.topology.fabric import NVLS_CAPABILITY  # here: ranks on CPUs need nothing of it

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= NVLS_CAPABILITY


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


def _node_rates(infos: Sequence[PeerInfo], cluster: Cluster) -> list[float]:
    """What each node sends, as given, else as its topology says; empty where neither is known of all ranks.

    Of GPUs only what was given counts: what their topology says of a node depends on which NICs its ranks happen to
    drive, and on no GPU have owners by the links been tried.
    """
    rates = [info.nic_bytes_per_second for info in infos]
    if None in rates and infos[0].device != "cuda":
        rates = [info.hardware.inter_node for info in infos]
    known = [rate for rate in rates if rate is not None]
    return [min(known[rank] for rank in node) for node in cluster.nodes] if len(known) == len(rates) else []


def _with_links(locations: Sequence[tuple[int, ...]], intra: Link, inter: Link) -> Cluster:
    links = (intra, *[inter] * len(locations[0]))
    return Cluster(tuple(locations), tuple(map(Level, LEVEL_NAMES, links)))


def _assumed(infos: Sequence[PeerInfo]) -> tuple[Link, Link]:
    """The links inside a node and between nodes, with the rates that are known."""
    inside = _slowest([info.hardware.intra_node for info in infos])
    outwards = _slowest([info.nic_bytes_per_second for info in infos]) or _slowest(
        [info.hardware.inter_node for info in infos]
    )
    return (
        INTRA_NODE if inside is None else replace(INTRA_NODE, bytes_per_second=inside, presumed=False),
        INTER_NODE if outwards is None else replace(INTER_NODE, bytes_per_second=outwards, presumed=False),
    )


def _of_gpus(
    infos: Sequence[PeerInfo], cluster: Cluster, fabric: GpuFabric | None, config: Config
) -> tuple[Link, Link]:
    """The links as NCCL uses them: its latencies, and the NICs that the ranks of the smallest node drive."""
    from gradwire.topology.bandwidth import ALPHA_SECONDS  # here: ranks on CPUs need nothing of GPUs
    from gradwire.topology.fabric import CHANNELS_PER_NIC, NETWORK_SECONDS, sender_nics

    intra, inter = (level.link for level in cluster.levels[:2])
    intra = replace(intra, alpha_seconds=ALPHA_SECONDS["nvlink" if fabric is not None and fabric.nvlink else "pcie"])
    network = "tcp" if fabric is None else fabric.network
    inter = replace(inter, alpha_seconds=ALPHA_SECONDS["network"] + NETWORK_SECONDS[network])
    nics = [_driven_nics(infos, node) for node in cluster.nodes]
    if any(count is None for count, _ in nics):
        return intra, inter
    count = min(count for count, _ in nics if count is not None)
    # Fewer ranks than GPUs drive fewer NICs than the machine's rate is of; a rate that was given stands.
    share = min(share for _, share in nics) if config.nic_bytes_per_second is None else 1.0
    ranks = max(len(node) for node in cluster.nodes)
    return intra, replace(
        inter,
        bytes_per_second=inter.bytes_per_second * share,
        nics=count,
        channels=CHANNELS_PER_NIC * count,
        sender_nics=sender_nics(count, ranks),
    )


def _driven_nics(infos: Sequence[PeerInfo], node: Sequence[int]) -> tuple[int | None, float]:
    """NICs that the ranks of a node drive, None where that is unknown, and their share of the machine's."""
    ranks = [infos[rank].hardware for rank in node]
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
