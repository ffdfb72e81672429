"""Describes the nearest NIC of each local rank for the report, and picks the interface of each rank for gloo.

NCCL finds the nearest NIC of each GPU itself, by the same rules as the topology, so for GPUs this is only a report.
Gloo uses one interface for all ranks of a host; with `nics="per_rank"` each rank gets its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.config import NIC_PER_RANK, Config
from gradwire.topology.wording import ranks_in_words

UNKNOWN = "?"

Nodes = Sequence[Sequence[PeerInfo]]


def describe_nics(infos: Sequence[PeerInfo], config: Config) -> tuple[str, ...]:
    """Returns a line with the NICs by local rank, and one per problem; if no NIC is known, only the reasons for that.

    Args:
        infos: Infos of all ranks, in rank order.
        config: The user's settings.
    """
    found: dict[object, list[PeerInfo]] = defaultdict(list)
    for info in infos:
        found[info.location, info.host].append(info)
    nodes = list(found.values())
    if all(info.hardware.nic is None for info in infos):
        return _unknown(infos)
    return (_by_local_rank(nodes), *_unknown(infos), *_shared(nodes), *_unused_by_gloo(nodes, config))


def interface_of(infos: Sequence[PeerInfo], rank: int, config: Config) -> str | None:
    """Returns the network interface for gloo on this rank; None if `nics` leaves the choice to gloo.

    Args:
        infos: Infos of all ranks, in rank order.
        rank: This rank.
        config: The user's settings, with `nics`.

    Raises:
        ValueError: `nics` is per rank, and a rank has no known interface. Raised on every rank.
    """
    if config.nics != NIC_PER_RANK:
        return None
    without = [info.rank for info in infos if info.hardware.interface is None]
    if without:
        why = infos[without[0]].hardware.nic_unknown
        raise ValueError(
            f"`nics` is {NIC_PER_RANK}, but no network interface is known for rank {without[0]} "
            f"({len(without)} of {len(infos)} ranks{f'; {why}' if why else ''}): leave it out, and name one in "
            "GLOO_SOCKET_IFNAME"
        )
    return infos[rank].hardware.interface


def _unknown(infos: Sequence[PeerInfo]) -> tuple[str, ...]:
    """Returns a line for each reason why a NIC is unknown, with its ranks."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for info in infos:
        if info.hardware.nic_unknown:
            ranks[info.hardware.nic_unknown].append(info.rank)
    return tuple(f"NIC of {ranks_in_words(of)} unknown: {why}" for why, of in ranks.items())


def _by_local_rank(nodes: Nodes) -> str:
    """Formats the NICs: `NIC by local rank: mlx5_0, mlx5_1 on all 2 nodes`, with a part for each kind of node."""
    rows: Mapping[tuple[str, ...], list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        rows[tuple(info.hardware.nic or UNKNOWN for info in node)].append(number)
    lines = []
    for row, numbers in rows.items():
        alike = len(row) > 1 and len(set(row)) == 1
        names = f"{row[0]} for all {len(row)}" if alike else ", ".join(row)
        where = f"all {len(nodes)} nodes" if len(numbers) == len(nodes) > 1 else f"node {', '.join(map(str, numbers))}"
        lines.append(f"{names} on {where}")
    return f"NIC by local rank: {'; '.join(lines)}"


def _shared(nodes: Nodes) -> list[str]:
    """Returns a line for each node on which ranks share one of its fastest NICs while another of these is idle.

    Nodes with a rank whose NIC is unknown have no line.

    Args:
        nodes: Infos of the ranks of each node.
    """
    # Imported here: not needed if no NIC is known.
    from gradwire.topology.assign import nic_sharing

    found = [nic_sharing({info.rank: info.hardware.nic for info in node}, node[0].hardware.fastest) for node in nodes]
    remedy = "give the ranks GPUs that are near different NICs"
    return [f"node {number}: {text}: {remedy}" for number, text in enumerate(found) if text]


def _unused_by_gloo(nodes: Nodes, config: Config) -> list[str]:
    """Returns a warning about nodes on which gloo uses one NIC, though their ranks are near different ones.

    Args:
        nodes: Infos of the ranks of each node.
        config: The user's settings; with `nics="per_rank"`, or MPI as transport, there is nothing to warn of.

    Returns:
        One line that names the nodes; no line if there are none. Nodes whose ranks train on GPUs do not count.
    """
    if config.nics == NIC_PER_RANK or config.transport_name == "mpi":
        return []
    several = [
        str(number)
        for number, node in enumerate(nodes)
        if node[0].device == "cpu" and len({info.hardware.interface for info in node} - {None}) > 1
    ]
    line = (
        f'node {", ".join(several)}: gloo takes the same interface for all ranks: nics="per_rank" gives each its own, '
        "where the networks reach each other; for one rank to use both, bond them (ip link ... type bond) or use MPTCP"
    )
    return [line] if several else []
