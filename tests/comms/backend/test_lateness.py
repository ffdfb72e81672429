"""A law of every collective: a wait for a rank that does not come ends by the group's time-out and the stated margin.

Ranks are processes; nodes are logical. Rank 1 makes a group for each collective, and calls nothing.
"""

import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.comms.transport.works import WAIT_MARGIN
from support import calls
from support.processes import Processes

TIMEOUT = timedelta(seconds=2)
ENDS_ALONE = ("reduce", "gather")
"""Rank 0 sends to rank 1 and has nothing to wait for, once that is in the socket."""


def wait_for_nobody(rank: int, leaves: bool) -> dict[str, tuple[float, str]]:
    warnings.simplefilter("ignore")
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    every = [*calls.REDUCING, *(call for call in calls.MOVING if call is not calls.message)]
    groups = [dist.new_group(backend="gradwire", timeout=TIMEOUT) for _ in every]
    dist.barrier()
    found: dict[str, tuple[float, str]] = {}
    if rank == 1:
        if not leaves:
            store.wait(["over"], timedelta(seconds=80))
        return found

    def attempt(call: calls.Call, group: dist.ProcessGroup) -> None:
        issue, written = call(torch.float32, "plain", dist.ReduceOp.SUM, rank)
        began = time.monotonic()
        outcome = calls.attempt((lambda: issue(group=group), written))
        found[call.__name__] = time.monotonic() - began, f"{outcome.stage} {outcome.said}"

    threads = [threading.Thread(target=attempt, args=each, daemon=True) for each in zip(every, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join((TIMEOUT + 2 * WAIT_MARGIN).total_seconds())
    store.set("over", "")
    return found


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids=["one node", "two nodes"])
@pytest.mark.parametrize("leaves", [False, True], ids=["late", "ended"])
def test_every_wait_ends(processes: Processes, nodes: list[str], leaves: bool) -> None:
    found, _ = processes(2, wait_for_nobody, leaves, nodes=nodes, lost=(1,), agent=True)
    assert len(found) == len(calls.REDUCING) + len(calls.MOVING) - 1, "the others hang"
    for name, (seconds, outcome) in found.items():
        assert seconds < (TIMEOUT + WAIT_MARGIN).total_seconds(), (name, seconds, outcome)
        assert name in ENDS_ALONE or outcome.startswith("wait RuntimeError") or "CollectiveError" in outcome, outcome
