"""Where each rank sits: node and local rank for every rank of a job, and the variables that torchrun would set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["contiguous", "round-robin"]
"""contiguous fills node 0 first, as torchrun does; round-robin deals the ranks over the nodes like cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int


def seat_ranks(nodes: Sequence[int], order: str = "contiguous") -> tuple[Seat, ...]:
    """Seats the ranks of a job on its nodes.

    Args:
        nodes: Ranks of each node, one entry a node; each at least 1.
        order: One of `Order`.

    Returns:
        The seats, by rank.

    Raises:
        ValueError: if there is no node, a node without ranks, or an order that is unknown.
    """
    if not nodes or min(nodes) < 1:
        raise ValueError(f"`nodes`: found {list(nodes)}, wanted at least one node and at least one rank on each")
    if order not in get_args(Order):
        raise ValueError(f"`order`: found {order!r}, wanted one of {', '.join(get_args(Order))}")
    chairs = [(node, local_rank) for node, count in enumerate(nodes) for local_rank in range(count)]
    if order == "round-robin":
        # One round deals a card to every node that still has a chair free.
        chairs.sort(key=lambda chair: (chair[1], chair[0]))
    return tuple(
        Seat(rank=rank, node=node, local_rank=local_rank, local_world_size=nodes[node])
        for rank, (node, local_rank) in enumerate(chairs)
    )


def torchrun_environment(
    seat: Seat, seats: Sequence[Seat], *, master_address: str, master_port: int, run_id: str
) -> dict[str, str]:
    """The environment that torchrun gives to a rank, so that a script written for torchrun needs no change.

    Args:
        seat: The rank's own seat.
        seats: The seats of the whole job.
        master_address: Address of the node of rank 0.
        master_port: TCP port of the store that rank 0 opens there.
        run_id: The job's name.

    Source: PyTorch documentation, torchrun (Elastic Launch), Environment Variables.
    """
    world_size = str(len(seats))
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.node),
        "GROUP_WORLD_SIZE": str(1 + max(other.node for other in seats)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # torchrun's agent serves the store and says True; here nobody but rank 0 can open it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
