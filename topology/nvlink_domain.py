"""Hosts of one NVLink domain, as the trays of an NVL72: their GPUs reach each other over NVLink, without a NIC."""

from collections.abc import Sequence
from dataclasses import replace

from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster

MOST_GPUS = 72
"""Most GPUs of one NVLink domain. Source: NVIDIA GB200 NVL72 data sheet."""

MOST_CHANNELS = 64
"""Most channels of one NCCL communicator. Source: NCCL v2.30 src/include/device.h, MAXCHANNELS."""


def joined_by_nvlink(cluster: Cluster, domains: Sequence[str]) -> Cluster:
    """Returns the cluster with NVLink as the link between nodes that are hosts of one NVLink domain.

    If one domain has all nodes, NVLink joins everything. If there are several, they become the cluster's racks, and a
    node outside of every domain is a rack of its own. Racks of the user stay, and NVLink joins the nodes of a rack if
    that is true of every rack. The cluster is returned unchanged if no two nodes share a domain.

    Source: NCCL v2.30 src/mnnvl.cc: the ranks of one clique are joined as if one host had them all.

    Args:
        cluster: Cluster whose innermost link is NVLink.
        domains: NVLink domain of each rank's host; empty if it has none.
    """
    of_node: dict[tuple[int, ...], object] = {}
    for location, domain in zip(cluster.locations, domains, strict=True):
        of_node[location] = domain if domain and of_node.get(location, domain) == domain else location
    found = list(dict.fromkeys(of_node.values()))
    if len(found) == len(of_node):
        return cluster
    intra, *outer = cluster.levels
    between = _between_hosts(intra.link, min(map(len, cluster.nodes)))
    if len(found) == 1:
        levels = (intra, *(replace(level, link=between) for level in outer))
        return replace(cluster, levels=levels, fabric=None, equal_sums=True)
    levels, locations = (intra, Level(LEVEL_NAMES[1], between), *outer[1:]), cluster.locations
    if cluster.depth > 2:
        racks = {(node[:-1], domain) for node, domain in of_node.items()}
        if len(racks) > len({rack for rack, _ in racks}):
            return cluster
    else:
        # Towards others a domain has the NICs of all of its hosts; the domain with the fewest hosts counts.
        out, hosts = outer[0].link, min(list(of_node.values()).count(domain) for domain in found)
        rate, channels = out.bytes_per_second * hosts, min(out.channels * hosts, MOST_CHANNELS)
        out = replace(out, bytes_per_second=rate, nics=out.nics * hosts, channels=channels)
        levels = (*levels, Level(LEVEL_NAMES[2], out))
        locations = tuple((found.index(of_node[node]), *node) for node in locations)
    return replace(cluster, locations=locations, levels=levels, fabric=None, equal_sums=True)


def cluster_of_domains(count: int, nodes: int, levels: tuple[Level, Level]) -> Cluster:
    """Returns a cluster of hosts in as few NVLink domains as hold them; several domains are its racks.

    Args:
        count: Ranks of a node.
        nodes: Number of nodes, which the domains share as equally as possible.
        levels: Levels inside a node, and over its NICs.
    """
    domains = -(-nodes * count // MOST_GPUS)
    names = [f"{node * domains // nodes}" for node in range(nodes) for _ in range(count)]
    return joined_by_nvlink(uniform_cluster((count, nodes), levels), names)


def _between_hosts(inside: Link, ranks: int) -> Link:
    """Returns the link between hosts: each GPU has its own NVLinks to all others.

    Args:
        inside: Link of one GPU inside its host.
        ranks: Number of GPUs of a host.
    """
    rate = inside.bytes_per_second * ranks
    return replace(inside, bytes_per_second=rate, nics=ranks, channels=ranks, sender_nics=1, nvlink=True)
