"""Law: a rank that ends while others go on, without an error of its own, is named with what they wait for it in."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import gradwire
from support.processes import Processes


def stalls_behind_an_error(rank: int, wrong: str) -> list[str] | None:
    """What rank 0 reports when it ends with an error, and rank 1 has ended before, without a word."""
    watch = gradwire.watch()
    dist.init_process_group("gloo")
    store = distributed_c10d._get_default_store()
    for _ in range(5):
        dist.all_reduce(torch.ones(10))
    time.sleep(2.0)  # it has said so
    if rank == 1:
        store.wait(["issued/0", "issued/2"])
        os._exit(0)
    try:
        if wrong == "another collective":
            work = dist.all_reduce(torch.ones(10), async_op=True)
            store.set(f"issued/{rank}", "")
            work.wait()
        store.set(f"issued/{rank}", "")
        time.sleep(1.0)
        raise ValueError("in the evaluation, long after the last collective")
    except (RuntimeError, ValueError):
        sys.excepthook(*sys.exc_info())  # as Python calls it
    assert rank or watch.report is not None
    return list(watch.report.stalls) if watch.report is not None else None


@pytest.mark.parametrize("wrong", ["another collective", "the evaluation"])
def test_a_rank_that_left_early_is_named_and_one_that_was_through_is_not(wrong: str, processes: Processes) -> None:
    stalls, gone, _ = processes(3, stalls_behind_an_error, wrong, lost=[1])
    assert gone is None and isinstance(stalls, list)
    if wrong == "the evaluation":
        assert stalls == []
    else:
        (stall,) = stalls
        assert stall.startswith("rank 1 on ") and "not ended collective 6 of group default (all_reduce of [10]" in stall
        assert stall.endswith("ranks 0, 2 wait in it")
