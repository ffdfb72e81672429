"""Hosts of one NVLink domain, as the trays of an NVL72: their GPUs reach each other over NVLink, without a NIC."""

from collections.abc import Sequence
from dataclasses import replace

from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster

MOST_GPUS = 72
"""Most GPUs of one NVLink domain. Source: NVIDIA GB200 NVL72 data sheet."""


def joined_by_nvlink(cluster: Cluster) -> Cluster:
    """Returns the cluster with NVLink as the link between its nodes, which are hosts of one NVLink domain.

    Source: NCCL v2.30 src/mnnvl.cc: the ranks of one clique are joined as if one host had them all.

    Args:
        cluster: Cluster whose innermost link is NVLink.
    """
    intra, *outer = cluster.levels
    between = _between_hosts(intra.link, min(map(len, cluster.nodes)))
    levels = (intra, *(replace(level, link=between) for level in outer))
    return replace(cluster, levels=levels, fabric=None, equal_sums=True)


def cluster_of_domains(count: int, nodes: int, levels: tuple[Level, Level]) -> Cluster:
    """Returns a cluster of hosts in as few NVLink domains as hold them; several domains are its racks.

    Args:
        count: Ranks of a node.
        nodes: Number of nodes, which the domains share as equally as possible.
        levels: Levels inside a node, and over its NICs.
    """
    domains = -(-nodes * count // MOST_GPUS)
    if domains == 1:
        return joined_by_nvlink(uniform_cluster((count, nodes), levels))
    intra, outside = levels
    between = Level(LEVEL_NAMES[1], _between_hosts(intra.link, count))
    locations = tuple((node * domains // nodes, node) for node in range(nodes) for _ in range(count))
    return Cluster(locations, (intra, between, Level(LEVEL_NAMES[2], outside.link)), equal_sums=True)


def same_domain(domains: Sequence[str]) -> bool:
    """Returns whether NVLink joins all hosts.

    Args:
        domains: NVLink domain of each rank's host; empty if it has none.
    """
    return len(set(domains)) == 1 and bool(domains[0])


def _between_hosts(inside: Link, ranks: int) -> Link:
    """Returns the link between hosts: each GPU has its own NVLinks to all others.

    Args:
        inside: Link of one GPU inside its host.
        ranks: Number of GPUs of a host.
    """
    rate = inside.bytes_per_second * ranks
    return replace(inside, bytes_per_second=rate, nics=ranks, channels=ranks, sender_nics=1, nvlink=True)
