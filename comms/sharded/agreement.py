"""Agreement of all ranks of a sharded model before the first step, so that a mistake raises on all of them.

The ranks form a grid, a two-dimensional device mesh: a rank shares parameters with its *shard group* and averages
gradients with its *replica group*. Each rank publishes its settings or its error in the store, reads those of both
groups, and publishes the outcome once more. After two rounds every rank knows of an error anywhere in the grid, and no
rank waits for one that has raised.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist

from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.gathering import gather_bytes
from gradwire.comms.boundary.messages import MessageType, Most, Rank

ROUNDS = 2
"""Rounds until an error reaches every rank of the grid: one in its shard group, one in its replica group."""

OK, ERROR = "ok ", "error "

_START: MessageType[str] = MessageType(Annotated[str, Most(64)])
"""The name that a rank proposes for this start of the job."""
_RANKS: MessageType[tuple[int, ...]] = MessageType(tuple[Rank, ...])
"""The ranks of a rank's shard group and replica group."""


def agree_on_grid(
    store: Store, name: str, rank: int, peers: Iterable[int], wanted: str, error: str | None, timeout: timedelta
) -> None:
    """Compares the settings of all ranks of the grid, so that an error on one rank raises on all of them.

    Args:
        store: Store that all ranks share.
        name: Name of this agreement, unique in the store and the same on all ranks.
        rank: This rank in the store's group.
        peers: Ranks of this rank's shard group and replica group.
        wanted: Description of the settings, which must be equal on all ranks.
        error: Error of this rank; None if it has none.
        timeout: Longest wait for each peer.

    Raises:
        ValueError: On all ranks, if one of them has an error or two have different settings.
        RuntimeError: A peer published nothing within `timeout`.
    """
    polling = PollingStore(PrefixStore(f"gradwire/sharded/{name}", store), timeout)
    others = sorted(set(peers) - {rank})
    for number in range(ROUNDS):
        polling.set(f"{number}/{rank}", OK + wanted if error is None else ERROR + error)
        for other in others:
            if error is not None:
                break
            found = _read(polling, f"{number}/{other}", other)
            if found.startswith(ERROR):
                error = found.removeprefix(ERROR)
            elif found.removeprefix(OK) != wanted:
                error = f"rank {rank} has {wanted}; rank {other} has {found.removeprefix(OK)}; wanted the same on all"
        if error is not None and number + 1 < ROUNDS:
            polling.set(f"{number + 1}/{rank}", ERROR + error)
            break
    if error is not None:
        raise ValueError(error)


def _read(polling: PollingStore, key: str, rank: int) -> str:
    """Waits until a rank has published its settings or its error in the store, and returns that text.

    Args:
        polling: Store of the agreement, whose timeout limits the wait.
        key: Key under which the rank publishes it.
        rank: That rank, for the error.

    Raises:
        RuntimeError: The rank published nothing within the timeout; names it and says that it must call
            `gradwire.fsdp.apply()`.
    """
    try:
        return polling.get(key).decode()
    except RuntimeError as failed:
        raise RuntimeError(
            f"rank {rank} did not call gradwire.fsdp.apply() within the time-out: all ranks of `replicas` and of the "
            "mesh that the model is sharded over must call it"
        ) from failed


def reporter_of_grid(
    store: Store, name: str, groups: Sequence[dist.ProcessGroup], peers: Iterable[int], timeout: timedelta
) -> StoreFailureReporter:
    """Makes the reporter through which all ranks of a grid (shard groups by replica groups) learn of a rank failure.

    All ranks of the grid call it together.

    A rank knows only its own two groups. The other ranks of the grid are read from the store when a rank has failed.

    Args:
        store: Store that all ranks of the default group share.
        name: Name of the agreement, as for `agree_on_grid`, which has succeeded before.
        groups: This rank's shard group and replica group, in the same order on all ranks.
        peers: Ranks of these groups, numbered in the default group.
        timeout: Longest wait for an answer of the store.
    """
    # A name of this start keeps its keys apart from those of an earlier start of the job in the same store.
    start = secrets.token_hex(8)
    for group in groups:
        start = min(map(_START.read, gather_bytes(json.dumps(start).encode(), group)))
    rank = dist.get_rank()
    polling = PollingStore(PrefixStore(f"gradwire/sharded/{name}/{start}", store), timeout)
    polling.set(f"peers/{rank}", json.dumps(sorted({*peers, rank})))

    def ranks_of_grid() -> set[int]:
        # Follow the published groups from rank to rank until no new rank is found.
        found, todo = {rank}, [rank]
        while todo:
            key = f"peers/{todo.pop()}"
            known = set(_RANKS.read(polling.get(key))) if polling.check([key]) else set()
            todo += known - found
            found |= known
        return found

    reporter = StoreFailureReporter(polling, rank, dist.get_world_size(), ranks_of_grid)
    reporter.publish(start)
    return reporter
