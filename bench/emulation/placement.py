"""Placement of ranks on the nodes of an emulated job, and the variables that torchrun would set for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["contiguous", "round-robin"]
"""Order of ranks over nodes: contiguous fills node 0 first, as torchrun does; round-robin alternates between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of one rank: its node, and its index among the ranks of that node."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int


def place_ranks(nodes: Sequence[int], order: str = "contiguous") -> tuple[Placement, ...]:
    """Assigns the ranks of a job to its nodes.

    Args:
        nodes: Number of ranks of each node, each at least 1.
        order: Order of ranks over nodes, one of `Order`.

    Returns:
        The placement of each rank, by rank.

    Raises:
        ValueError: There is no node, a node has no ranks, or the order is unknown.
    """
    if not nodes or min(nodes) < 1:
        raise ValueError(f"`nodes`: found {list(nodes)}, wanted at least one node and at least one rank on each")
    if order not in get_args(Order):
        raise ValueError(f"`order`: found {order!r}, wanted one of {', '.join(get_args(Order))}")
    free = [(node, local_rank) for node, count in enumerate(nodes) for local_rank in range(count)]
    if order == "round-robin":
        # Each round gives the next rank to every node that has a slot left.
        free.sort(key=lambda slot: (slot[1], slot[0]))
    return tuple(
        Placement(rank=rank, node=node, local_rank=local_rank, local_world_size=nodes[node])
        for rank, (node, local_rank) in enumerate(free)
    )


def torchrun_environment(
    placement: Placement, placements: Sequence[Placement], *, master_address: str, master_port: int, run_id: str
) -> dict[str, str]:
    """Returns the variables that torchrun would set for a rank, so that a script written for torchrun runs unchanged.

    Args:
        placement: Placement of the rank.
        placements: Placements of all ranks of the job.
        master_address: Address of the node of rank 0.
        master_port: TCP port of the store that rank 0 serves there.
        run_id: Name of the job.

    Source: PyTorch documentation, torchrun (Elastic AllReduce), Environment Variables.
    """
    world_size = str(len(placements))
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(1 + max(other.node for other in placements)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # torchrun's agent serves the store and says True; here nobody but rank 0 can open it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
