"""Makes the cluster of many equal machines from the description of one, for predictions."""

from dataclasses import replace

from gradwire.comms.links.distance import over_distance
from gradwire.comms.plan.codec_price import GPU_MEMORY_SHARE
from gradwire.compressors.speed import core_bytes_per_second
from gradwire.topology.assign import nics_of_gpus
from gradwire.topology.bandwidth import memory_bytes_per_second
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from gradwire.topology.fabric import (
    CHANNELS_PER_NIC,
    TCP_ALPHA_SECONDS,
    TCP_SHARE,
    fabric_of,
    network_of_nics,
    sender_nics,
    slowest_memory,
)
from gradwire.topology.graph import Machine
from gradwire.topology.levels import levels_of
from gradwire.topology.nvlink_domain import cluster_of_domains
from gradwire.topology.pci_ids import AMD_GPU

HOST_MEMORY_BYTES_PER_SECOND = 5e9
"""Bytes per second of a rank on a CPU through shared memory: all-reduces of 64 MB, EPYC (Zen 4), 2026."""


def cluster_of_machines(
    machine: Machine,
    nodes: int,
    *,
    ranks_per_node: int | None = None,
    nic_bits_per_second: float | None = None,
    nics_per_node: int | None = None,
    intra_bits_per_second: float | None = None,
    round_trip_seconds: float = 0.0,
    loss: float = 0.0,
) -> Cluster:
    """Returns a cluster of `nodes` machines like this one.

    Args:
        machine: Topology of one node.
        nodes: Number of nodes.
        ranks_per_node: Ranks of a node; None takes one for each GPU, or for each CPU socket without GPUs.
        nic_bits_per_second: Rate of one NIC instead of the machine's; Ethernet and TCP are assumed then.
        nics_per_node: NICs used for gradients; None takes 1 with a rate given, else those of the machine.
        intra_bits_per_second: Rate of one rank inside its node instead of the topology's.
        round_trip_seconds: Round trip between two nodes, without GPUs.
        loss: Probability that a packet between nodes is lost, with a round trip.

    Raises:
        ValueError: A number is out of range; a bandwidth is neither known nor given; or a round trip or a loss is given
            for machines with GPUs.
    """
    for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node), ("nics_per_node", nics_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}; wanted a whole number of at least 1")
    # The link inside a node: the given rate, else the topology's.
    count = ranks_per_node or len(machine.gpus) or len({cpu.socket for cpu in machine.cpus}) or 1
    intra, inter = levels_of(machine, host_memory_bytes_per_second=HOST_MEMORY_BYTES_PER_SECOND)
    inside = intra.bytes_per_second if intra_bits_per_second is None else intra_bits_per_second / 8
    if inside is None and count > 1:
        raise ValueError(
            "`--intra-node` is not given and the topology does not say how fast the GPUs of a node are connected; "
            "wanted a rate such as 1880gbit, or what `gradwire topo --json` prints on the machine itself"
        )
    if (round_trip_seconds or loss) and machine.gpus:
        raise ValueError(
            "`--rtt` is given for machines with GPUs; wanted machines without: what NCCL makes of long round trips "
            "is not known"
        )
    # The link between nodes: the NICs' rate, over the round trip if there is one.
    outside = _nic(machine, count, inter.bytes_per_second, inter.alpha_seconds, nic_bits_per_second, nics_per_node)
    levels = (
        Level(LEVEL_NAMES[0], Link(intra.alpha_seconds, inside or HOST_MEMORY_BYTES_PER_SECOND)),
        Level(LEVEL_NAMES[1], over_distance(outside, nodes, round_trip_seconds, loss)),
    )
    memory = slowest_memory(machine)
    if machine.nvlink_domain is not None and nodes > 1:
        return replace(cluster_of_domains(count, nodes, levels), memory_bytes_per_second=memory)
    fabric = fabric_of(machine, network=None if nic_bits_per_second is None else "tcp")
    cluster = replace(uniform_cluster((count, nodes), levels), memory_bytes_per_second=memory)
    return replace(cluster, fabric=fabric, equal_sums=fabric is not None)


def codec_bytes_per_second(machine: Machine) -> float:
    """Returns the memory rate of the processor that runs codecs, in bytes per second: a GPU, or one CPU core.

    The rate of a CPU is measured on the machine that predicts, because the description of a machine does not tell it.

    Args:
        machine: Topology of one node.
    """
    if machine.gpus:
        return GPU_MEMORY_SHARE * min(memory_bytes_per_second(gpu) for gpu in machine.gpus)
    return core_bytes_per_second()


def has_kernels(machine: Machine) -> bool:
    """Returns whether compressors have kernels for a machine's processors: all but AMD's GPUs.

    Args:
        machine: Topology of one node.
    """
    return not any(gpu.vendor == AMD_GPU for gpu in machine.gpus)


def library_of(machine: Machine) -> str:
    """Returns the library that runs a flat plan: `nccl` on GPUs, else `gloo`.

    Args:
        machine: Topology of one node.
    """
    return "nccl" if machine.gpus else "gloo"


def over_tcp(machine: Machine, *, nic_given: bool) -> bool:
    """Returns whether NCCL is taken to send through TCP, where nothing says how much of a NIC's rate it reaches.

    Args:
        machine: Topology of one node.
        nic_given: Whether the rate of a NIC is given in place of the machine's: Ethernet and TCP are assumed then.
    """
    driven = [nic for nic in nics_of_gpus(machine).values() if nic is not None]
    return bool(machine.gpus) and (nic_given or network_of_nics(driven) == "tcp")


def payload_share(*, has_gpus: bool) -> float:
    """Returns the part of a NIC's given rate that gradients reach.

    TCP's without GPUs, as measured on emulated links of 40 to 200 Mbit/s. All of it with GPUs: NCCL may use RDMA, and
    what it reaches over TCP differs too much for a figure, see `predict_show.TCP_IS_BOUND`.

    Args:
        has_gpus: Whether the nodes have GPUs.
    """
    return 1.0 if has_gpus else TCP_SHARE


def _nic(
    machine: Machine,
    ranks: int,
    bytes_per_second: float | None,
    alpha_seconds: float,
    bits_per_second: float | None,
    nics_per_node: int | None,
) -> Link:
    driven = len({nic.key for nic in nics_of_gpus(machine).values() if nic is not None}) or 1
    if bits_per_second is not None:
        nics, alpha = nics_per_node or 1, TCP_ALPHA_SECONDS
        total = bits_per_second / 8 * nics * payload_share(has_gpus=bool(machine.gpus))
    elif bytes_per_second is not None:
        total, nics, alpha = (
            bytes_per_second / driven * (nics_per_node or driven),
            nics_per_node or driven,
            alpha_seconds,
        )
    else:
        raise ValueError(
            "`--nic` is not given and the topology does not say how fast its network cards are; wanted a rate "
            "such as 25gbit"
        )
    if not machine.gpus:
        return Link(alpha, total, nics)
    return Link(alpha, total, nics, CHANNELS_PER_NIC * nics, sender_nics=sender_nics(nics, ranks))
