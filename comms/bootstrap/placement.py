"""Placement of ranks on nodes, derived from each rank's `PeerInfo` (exchanged by rendezvous.py).

It is never computed from `rank // local_size`: nodes may have different numbers of ranks, ranks may be assigned
round-robin, and several jobs may share a host. Two ranks are on one node if host name, boot id and the device number of
/dev/shm are equal. So containers and emulated nodes on one kernel count as different nodes exactly if they cannot share
memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gradwire.comms.bootstrap.kernel import host_identity, own_kernel
from gradwire.comms.bootstrap.probe import PeerAddress
from gradwire.comms.boundary.messages import Addresses, Count, Kernel, Port, Rank
from gradwire.comms.config import Config
from gradwire.comms.environment import local_rank, visibility
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, GpuFabric, Level, Link
from gradwire.topology.host_summary import Hardware, host_summary

INTRA_NODE = Link(alpha_seconds=20e-6, bytes_per_second=5e9, presumed=True)
"""Link inside a node until it is measured, if the topology does not give it: shared memory of a small host."""

INTER_NODE = Link(alpha_seconds=100e-6, bytes_per_second=1.25e9, presumed=True)
"""Link between nodes until it is measured, if the topology does not give it: TCP over a 10 Gbit NIC."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Facts about one rank that all other ranks need before they connect (NCCL: peer info).

    Attributes:
        rank: Rank in the group.
        size: Size of the group, as this rank knows it.
        host: Host name, boot id and device number of /dev/shm.
        location: Names of the groups that its node belongs to, such as region and rack, outermost first.
        device: Type of the gradients' device: `cpu` or `cuda`.
        torch_version: Version of torch, `torch.__version__`.
        hardware: Summary of its machine's topology: bytes per second inside the machine and to the network, nearest
            NIC, GPU fabric.
        shared: Settings that must be equal on all ranks, by name.
        nic_bytes_per_second: Bytes per second that its node can send to other nodes; None if not configured.
        port: Port of its probe server; 0 if it has none.
        addresses: IP addresses of its host, best first.
        kernel: Id of the kernel of its process; empty if unknown.
        nvls_possible: Whether an NVSwitch next to its GPU, if there is one, could sum in the switch.
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

    @property
    def address(self) -> PeerAddress | None:
        """Address of its probe server; None if it has none."""
        return PeerAddress(self.port, self.addresses, self.kernel) if self.port else None

    @classmethod
    def here(
        cls, rank: int, size: int, config: Config, device: torch.device, *, known: Hardware | None = None
    ) -> "PeerInfo":
        """Returns the info of this process, without the address of a probe server.

        Args:
            rank: Rank in the group.
            size: Size of the group.
            config: The user's settings.
            device: Device of the gradients.
            known: Hardware of this machine; None reads its topology.
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
            config.given_rate,
            kernel=own_kernel(),
            nvls_possible=_nvls_possible(device),
        )


@lru_cache(maxsize=8)
def hardware(local_rank: int | None, device_type: str) -> Hardware:
    """Reads this host's topology, once a process: bandwidth inside and outwards, and the nearest NIC. Measures nothing.

    For `cpu` the bandwidth inside the machine, the GPU fabric and the rate of the GPUs' memory are left unknown.

    Args:
        local_rank: Index of this rank on its host; None if the launcher did not set it.
        device_type: `cpu` or `cuda`: type of the gradients' device.
    """
    host = host_summary(local_rank, visibility())
    if device_type == "cuda":
        return host
    return replace(host, intra_node=None, fabric=None, nvlink_domain="", memory_bytes_per_second=None)


def cluster_of(infos: Sequence[PeerInfo], config: Config) -> Cluster:
    """Builds the cluster: the place of each rank, and links with configured, detected or default speeds.

    For CUDA the links are NCCL's: its latencies over NVLink, PCIe and the kind of network, the NICs that the nodes'
    GPUs drive, the rate of the GPUs' memory, and the fabric if all ranks know theirs; NVLink between the hosts of one
    NVLink domain. Several such domains are the cluster's racks. Links that the topology does not give are marked
    `presumed`.

    Args:
        infos: Infos of all ranks, in rank order.
        config: The user's settings.

    Raises:
        ValueError: Ranks have locations of different depth.
    """
    depth = {len(info.location) for info in infos}
    if len(depth) > 1:
        raise ValueError(
            f"`hostname` has {sorted(depth)} units before the name on different ranks; wanted the same number on all"
        )
    # Number racks, nodes and so on in the order of their first rank.
    numbers: dict[tuple[object, ...], int] = {}
    locations = []
    for info in infos:
        outer = [_number(numbers, info.location[: end + 1]) for end in range(len(info.location))]
        locations.append((*outer, _number(numbers, (*info.location, info.host))))
    # Links on CPUs; for GPUs the first guess, from which NCCL's links are derived.
    cluster = _with_links(locations, *_default_links(infos))
    if infos[0].device != "cuda":
        return with_node_rates(cluster, _node_rates(infos, cluster))
    fabric = _common_fabric([info.hardware.fabric for info in infos])
    cluster = _with_links(locations, *_gpu_links(infos, cluster, fabric, config))
    nvls_possible = any(info.nvls_possible for info in infos)
    if any(info.hardware.nvlink_domain for info in infos):
        from gradwire.topology.nvlink_domain import joined_by_nvlink

        cluster = joined_by_nvlink(cluster, [info.hardware.nvlink_domain for info in infos])
    cluster = replace(with_node_rates(cluster, _node_rates(infos, cluster)), equal_sums=True)
    used = [cluster.levels[number].link for number in cluster.wide_levels]
    unlike = cluster.depth != 2 or any(link.presumed or link.nvlink for link in used)
    memory = _slowest([info.hardware.memory_bytes_per_second for info in infos])
    return replace(
        cluster, fabric=None if unlike else fabric, nvls_possible=nvls_possible, memory_bytes_per_second=memory
    )


def _nvls_possible(device: torch.device) -> bool:
    """Returns whether an NVSwitch next to a device, if there is one, could sum in the switch."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    # Imported here: ranks on CPUs do not need it.
    from gradwire.topology.fabric import NVLS_CAPABILITY

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= NVLS_CAPABILITY


def with_node_rates(cluster: Cluster, rates: Sequence[float]) -> Cluster:
    """Returns the cluster with other rates of its nodes' links.

    Args:
        cluster: Cluster of any depth.
        rates: Bytes per second of each node, in the order of `cluster.units(0)`; empty changes nothing. A rack or
            region gets the rate of its fastest node, and an NVLink domain the sum of its nodes' rates. NVLink between
            nodes keeps its own.
    """
    if not rates or cluster.depth == 1:
        return cluster
    known = dict(zip(cluster.units(0), rates, strict=True))
    levels = list(cluster.levels)
    together = math.fsum if levels[1].link.nvlink else max
    for number in range(1, cluster.depth):
        if not levels[number].link.nvlink:
            levels[number] = levels[number].with_rates(
                [
                    together([rate for node, rate in known.items() if node[: len(unit)] == unit])
                    for unit in cluster.units(number - 1)
                ]
            )
    return replace(cluster, levels=tuple(levels))


def _node_rates(infos: Sequence[PeerInfo], cluster: Cluster) -> list[float]:
    """Returns the bytes per second that each node can send, for plans in which nodes own parts by their links' rates.

    These are the rates that the ranks were configured with. If a rank has none and the ranks train on CPUs, all come
    from the nodes' topologies instead. On GPUs they do not: the rate in a topology depends on which NICs the ranks of a
    node happen to use, and unequal parts were never tried on GPUs.

    Args:
        infos: Infos of all ranks, in rank order.
        cluster: Placement of the ranks.

    Returns:
        The smallest rate of its ranks for each node; empty if a rank has none.
    """
    rates = [info.nic_bytes_per_second for info in infos]
    if None in rates and infos[0].device != "cuda":
        rates = [info.hardware.inter_node for info in infos]
    known = [rate for rate in rates if rate is not None]
    return [min(known[rank] for rank in node) for node in cluster.nodes] if len(known) == len(rates) else []


def _with_links(locations: Sequence[tuple[int, ...]], intra: Link, inter: Link) -> Cluster:
    """Returns a cluster whose lowest level has the link `intra`, and all levels above it `inter`."""
    links = (intra, *[inter] * len(locations[0]))
    return Cluster(tuple(locations), tuple(map(Level, LEVEL_NAMES, links)))


def _default_links(infos: Sequence[PeerInfo]) -> tuple[Link, Link]:
    """Returns (link inside a node, link between nodes) of the cost model, with the slowest rank's rates.

    A rate is the configured one or else that of the topology; if any rank's is unknown, the cost model's default stays,
    and the link is marked `presumed`.

    Args:
        infos: Infos of all ranks.
    """
    inside = _slowest([info.hardware.intra_node for info in infos])
    outwards = _slowest([info.nic_bytes_per_second for info in infos]) or _slowest(
        [info.hardware.inter_node for info in infos]
    )
    return (
        INTRA_NODE if inside is None else replace(INTRA_NODE, bytes_per_second=inside, presumed=False),
        INTER_NODE if outwards is None else replace(INTER_NODE, bytes_per_second=outwards, presumed=False),
    )


def _gpu_links(
    infos: Sequence[PeerInfo], cluster: Cluster, fabric: GpuFabric | None, config: Config
) -> tuple[Link, Link]:
    """Returns (link inside a node, link between nodes) as NCCL uses them: with its latencies and its number of NICs.

    Args:
        infos: Infos of all ranks.
        cluster: Cluster with the links of `_default_links`.
        fabric: GPU fabric that all ranks have; None if unknown, which takes PCIe and TCP.
        config: The user's settings; a rate in them is not scaled by the share of NICs that ranks drive.
    """
    # Imported here: ranks on CPUs do not need them.
    from gradwire.topology.bandwidth import ALPHA_SECONDS
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
    share = min(share for _, share in nics) if config.given_rate is None else 1.0
    ranks = max(len(node) for node in cluster.nodes)
    return intra, replace(
        inter,
        bytes_per_second=inter.bytes_per_second * share,
        nics=count,
        channels=CHANNELS_PER_NIC * count,
        sender_nics=sender_nics(count, ranks),
    )


def _driven_nics(infos: Sequence[PeerInfo], node: Sequence[int]) -> tuple[int | None, float]:
    """Returns (number of NICs that the ranks of a node drive, its share of the machine's NICs).

    Args:
        infos: Infos of all ranks.
        node: Ranks of the node.

    Returns:
        (None, 1.0) if the machine's number of NICs is unknown; all NICs if it is not known which one a rank is nearest
        to.
    """
    ranks = [infos[rank].hardware for rank in node]
    every = min((each.nics for each in ranks if each.nics is not None), default=None)
    if every is None:
        return None, 1.0
    own = {each.nic for each in ranks}
    if None in own or len(own) >= every:
        return every, 1.0
    return len(own), len(own) / every


def _common_fabric(fabrics: Sequence[GpuFabric | None]) -> GpuFabric | None:
    """Returns the fabric by which NCCL is priced on nodes of different kinds: what all have, with the lowest rates.

    Args:
        fabrics: GPU fabric of each rank; None if it is unknown.

    Returns:
        Fabric with the features that all ranks have, and the network of the highest latency; None if the fabric of
        any rank is unknown.
    """
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
    """Returns the lowest rate; None if one is unknown, because it could be the lowest."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _number(numbers: dict[tuple[object, ...], int], name: tuple[object, ...]) -> int:
    """Returns the number of a name; a new name gets the next free number, and is added to `numbers` in place."""
    return numbers.setdefault(name, len(numbers))
