"""Law: what a launcher ends a rank with, SIGTERM, ends it under a watch, too, whatever the rank is at; and no other."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.comms.bootstrap import forks
from gradwire.comms.watch import watch_store
from support.processes import Processes

STILL_HERE = "still here"
LONGEST_SECONDS = 20.0
"""Seconds after which a rank that was told to end is still here: it compares for five at most."""


def be_told_to_end() -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONGEST_SECONDS)
    return STILL_HERE


def without_others(_: int, when: str) -> str:
    gradwire.watch()
    if when != "before its group":
        dist.init_process_group("gloo")
    if when == "behind its group":
        dist.destroy_process_group()
    time.sleep(0.5)  # the watch has seen what there is
    return be_told_to_end()


@pytest.mark.parametrize("when", ["before its group", "alone in its group", "behind its group"])
def test_a_rank_without_others_ends(when: str, processes: Processes) -> None:
    assert processes(1, without_others, when, lost=[0]) == [None]


def without_store(rank: int) -> str:
    watch = gradwire.watch()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(1.0)  # the watch has begun
    if rank == 0:  # which serves the store
        os._exit(0)
    until = time.monotonic() + 60
    while watch._unanswered is None and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)  # were it to begin another session, it would wait there
    return be_told_to_end() if watch._unanswered is not None else "the watch has not given the store up"


def test_a_rank_whose_store_is_gone_ends(processes: Processes) -> None:
    assert processes(2, without_store, lost=[0, 1]) == [None, None]


def with_a_silent_store(rank: int) -> str:
    """Torch does not come back from connecting to a store whose server is stopped."""
    setattr(watch_store, "clone_of", lambda store: threading.Event().wait())  # noqa: B010 - of a module
    gradwire.watch()
    dist.init_process_group("gloo")
    time.sleep(1.0)  # the watch has begun to connect
    return be_told_to_end()


def test_a_rank_whose_watch_cannot_connect_ends(processes: Processes) -> None:
    assert processes(2, with_a_silent_store, lost=[0, 1]) == [None, None]


def behind_an_error(rank: int) -> str:
    gradwire.watch()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(1.0)
    if rank == 0:
        time.sleep(LONGEST_SECONDS)
        return "through"
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        sys.excepthook(*sys.exc_info())  # as Python calls it; then it waits for all threads of the program
    return be_told_to_end()


def test_a_rank_that_a_thread_keeps_behind_an_error_ends(processes: Processes) -> None:
    assert processes(2, behind_an_error, lost=[1]) == ["through", None]


def with_a_pool(rank: int) -> list[int]:
    """Ends its workers by SIGTERM, as multiprocessing does."""
    gradwire.watch()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(abs, [-rank, -2])
    time.sleep(0.5)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return found


def test_the_end_of_a_forked_child_is_not_the_ranks(processes: Processes) -> None:
    assert processes(2, with_a_pool) == [[0, 2], [1, 2]]


class ToldToEnd:
    """Stands for a SIGTERM that comes as soon as the child is there, as from a pool that is through already."""

    def leave_to_parent(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def with_a_child_that_just_begins(_: int) -> int:
    """Ends a forked child before it has left anything to its parent."""
    gradwire.watch()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(1.0)  # the watch has begun
    setattr(forks, "_all", [ToldToEnd(), *forks._all])  # noqa: B010 - of a module
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LONGEST_SECONDS,))
    child.start()
    child.join()
    time.sleep(1.0)  # the watch would have ended this rank
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return child.exitcode or 0


def test_the_end_of_a_child_that_just_begins_is_not_the_ranks(processes: Processes) -> None:
    assert processes(2, with_a_child_that_just_begins) == [-signal.SIGTERM, -signal.SIGTERM]


def with_a_child(_: int) -> tuple[int, bool]:
    """Forks a process that ends as Python ends, with what is registered for that."""
    watch = gradwire.watch()
    dist.init_process_group("gloo")
    child = multiprocessing.get_context("fork").Process(target=end_as_a_script)
    child.start()
    child.join()
    dist.destroy_process_group()
    return child.exitcode or 0, watch._closed.is_set()


def end_as_a_script() -> None:
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        sys.excepthook(*sys.exc_info())  # publishes to no store: the connection is the parent's


def test_a_forked_child_ends_for_itself(processes: Processes) -> None:
    assert processes(2, with_a_child) == [(0, False), (0, False)]
