"""Where the ranks that share a model's parameters are, and the groups of their two steps: inside a node and between.

With the same number of ranks on each node, every rank has a counterpart on each other node. Inside the node a step is
exact; only counterparts exchange what is compressed. So a byte crosses a node's card once, where a flat exchange would
send it once for each rank of the node.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gradwire.comms.bootstrap.placement import host_identity

log = logging.getLogger("gradwire")


@dataclass(frozen=True, slots=True, eq=False)
class ShardNodes:
    """The ranks of one group by node; all nodes hold as many.

    Attributes:
        group: All of them.
        members: For each node, indices in `group`; the place of a rank in its node is its place here.
        place: This rank's place in its node.
        inside: The ranks of this node; None where it is this rank alone.
        places: For each rank of `inside`, in that group's order, its place.
        between: The ranks of this place; None where there is one node.
        numbers: For each rank of `between`, in that group's order, the number of its node.
    """

    group: dist.ProcessGroup
    members: tuple[tuple[int, ...], ...]
    place: int
    inside: dist.ProcessGroup | None
    places: tuple[int, ...]
    between: dist.ProcessGroup | None
    numbers: tuple[int, ...]

    def describe(self) -> str:
        """In a few words, for a report."""
        nodes, width = len(self.members), len(self.members[0])
        if nodes == 1:
            return f"{width} ranks of one node, exact"
        return f"{nodes} nodes of {width}" if width > 1 else f"{nodes} ranks, flat"


def arrange(hosts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Indices by node, nodes in the order of their first rank; each rank a node of its own where nodes are uneven.

    Uneven nodes leave ranks without counterparts: then the exchange is flat.
    """
    nodes: dict[object, list[int]] = {}
    for index, host in enumerate(hosts):
        nodes.setdefault(host, []).append(index)
    found = tuple(tuple(indices) for indices in nodes.values())
    if len({len(indices) for indices in found}) > 1:
        log.info("nodes hold %s ranks that share parameters: exchanged flat", [len(indices) for indices in found])
        return tuple((index,) for index in range(len(hosts)))
    return found


def find_nodes(group: dist.ProcessGroup, hostname: str | None, flat: bool) -> ShardNodes:
    """Asks the ranks of a group where they are, and makes the groups of the two steps; all ranks of the group call it.

    Args:
        group: Of the default group's ranks.
        hostname: What the configuration names this host; None takes the system's.
        flat: Take each rank for a node of its own.
    """
    hosts: list[object] = [None] * group.size()
    dist.all_gather_object(hosts, host_identity(hostname), group=group)
    members = arrange(range(group.size()) if flat else hosts)
    rank = group.rank()
    node = next(indices for indices in members if rank in indices)
    place = node.index(rank)
    everyone = dist.get_process_group_ranks(group)
    # First the inner groups on all ranks, then the outer ones: nobody waits in a circle.
    inside = _part(group, [everyone[index] for index in node])
    between = _part(group, [everyone[indices[place]] for indices in members])
    places = [node.index(everyone.index(one)) for one in _ranks(inside)]
    numbers = [
        next(number for number, indices in enumerate(members) if everyone.index(one) in indices)
        for one in _ranks(between)
    ]
    return ShardNodes(group, members, place, inside, tuple(places), between, tuple(numbers))


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def _part(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup | None:
    """The group of some of a group's ranks: itself where they are all, None where there is one."""
    if len(ranks) == 1:
        return None
    if len(ranks) == group.size():
        return group
    part: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc="gradwire_sharded")
    return part
