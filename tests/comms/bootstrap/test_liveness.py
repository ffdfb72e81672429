"""Law: a rank whose process has ended is named by its neighbours within seconds; one that is slow or leaves is not."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import HashStore, store_of
from gradwire.comms.bootstrap.failure import FailureBoard
from gradwire.comms.bootstrap.liveness import Deadline, LivenessRing, own_addresses
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.errors import PeerError

SECONDS = 20.0


class Heard:
    """What one rank was told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.told = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.error = error
        self.told.set()


def ring(size: int, overdue: Callable[[], str | None] = lambda: None) -> tuple[list[LivenessRing], list[Heard]]:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = [Heard() for _ in range(size)]
    boards = [FailureBoard(store, rank, size) for rank in range(size)]
    rings = [
        LivenessRing(store, rank, size, boards[rank].alarm, heard[rank], overdue if rank == 0 else lambda: None)
        for rank in range(size)
    ]
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not any(each.told.is_set() for each in heard):
        if all(sum(peer.known for peer in list(each._peers.values())) == 2 for each in rings):
            break
        time.sleep(0.01)
    return rings, heard


@pytest.mark.parametrize("size", [2, 4])
def test_both_neighbours_name_a_rank_that_has_ended(size: int) -> None:
    rings, heard = ring(size)
    rings[1].close(orderly=False)
    for neighbour in {0, 2 % size}:
        assert heard[neighbour].told.wait(SECONDS)
        error = heard[neighbour].error
        assert isinstance(error, PeerError)
        assert error.missing == (1,)
        assert "rank 1 has ended" in str(error)
    for each in rings:
        each.close()


def test_a_rank_that_leaves_in_order_is_not_missed() -> None:
    rings, heard = ring(3)
    for each in rings:
        each.close()
    assert not any(each.told.is_set() for each in heard)
    assert not any(each._thread.is_alive() for each in rings)


def test_an_alarm_in_the_store_reaches_ranks_that_are_no_neighbours() -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = Heard()
    board = FailureBoard(store, 0, 1)
    store.set("alarm", "rank 7 saw an all-reduce fail")
    alone = LivenessRing(store, 0, 1, board.alarm, heard)
    assert heard.told.wait(SECONDS)
    assert "rank 7 saw" in str(heard.error)
    alone.close()


def test_what_takes_too_long_is_given_up() -> None:
    rings, heard = ring(2, overdue=lambda: "no progress for 3 s")
    assert heard[0].told.wait(SECONDS)
    assert "no progress" in str(heard[0].error)
    for each in rings:
        each.close()


def die(rank: int) -> str:
    """Rank 2 is killed by the system: nothing of Python runs any more there."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    group = dist.group.WORLD
    assert group is not None
    heard = Heard()
    store = PollingStore(store_of(group), timedelta(seconds=SECONDS))
    LivenessRing(store, rank, 3, lambda: None, heard)
    dist.barrier()
    if rank == 2:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert heard.told.wait(SECONDS)
    store.set(f"heard/{rank}", "1")
    if rank == 0:  # its process holds the store
        store.wait(["heard/1"])
    return str(heard.error)


@pytest.mark.slow
def test_a_killed_process_is_noticed(processes: Callable[..., list[Any]]) -> None:
    assert processes(3, die, lost=[2])[:2] == ["the process of rank 2 has ended"] * 2


class Event:
    """An event of a device that passes when a test says so."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_the_oldest_event_that_has_not_passed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline, first, second = Deadline(timedelta(seconds=5)), Event(), Event()
    assert not deadline.is_under_way
    deadline.watch(first.query)
    now = 4.0
    deadline.watch(second.query)
    assert deadline.overdue() is None
    now = 6.0
    assert deadline.overdue() == "no progress for 5 s: a rank is late, or has issued other collectives"
    first.passed = True
    assert deadline.overdue() is None
    assert deadline.is_under_way
    second.passed = True
    assert not deadline.is_under_way


def test_the_loopback_is_tried_last() -> None:
    assert own_addresses()[-1] == "127.0.0.1"
