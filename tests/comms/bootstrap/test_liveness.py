"""Law: a rank whose process has ended is named by its neighbours within seconds; one that is slow or leaves is not."""

import ctypes
import errno
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.comms.bootstrap import addresses, failure_reporter, kernel, liveness, probe, ring_connections
from gradwire.comms.bootstrap.addresses import own_addresses
from gradwire.comms.bootstrap.compat import HashStore, store_of
from gradwire.comms.bootstrap.deadline import Deadline
from gradwire.comms.bootstrap.failure_reporter import CollectiveError, StoreFailureReporter
from gradwire.comms.bootstrap.failures import (
    BROKEN,
    FAILED,
    OVERDUE,
    GroupFailures,
    PeerFailure,
    PeerFailureError,
    Source,
)
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.bootstrap.probe import PeerTable, ProbeServer
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES
from gradwire.comms.errors import OverdueError, PeerError
from support.processes import Processes, Said

SECONDS = 20.0


class Heard:
    """What one rank was told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.told = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.error = error
        self.told.set()


class Breaking(PollingStore):
    """A store whose server may go away."""

    is_gone = False
    refused = 0

    def __init__(self) -> None:
        super().__init__(HashStore(), timedelta(seconds=SECONDS))

    def check(self, keys: Any) -> bool:
        self._answer()
        return super().check(keys)

    def set(self, key: str, value: str | bytes) -> None:
        self._answer()
        super().set(key, value)

    def within(self, timeout: timedelta) -> "Breaking":
        return self

    def _answer(self) -> None:
        if self.is_gone:
            self.refused += 1
            raise RuntimeError("Broken pipe")


def ring(
    size: int,
    overdue: Source = lambda: None,
    launches: Callable[[int], int] = lambda rank: 0,
    store: PollingStore | None = None,
) -> tuple[list[LivenessRing], list[Heard]]:
    store = store or PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = [Heard() for _ in range(size)]
    reporters = [StoreFailureReporter(store, rank, size) for rank in range(size)]
    rings = [
        LivenessRing(
            store,
            rank,
            size,
            reporters[rank].failures,
            heard[rank],
            [overdue] if rank == 0 else [],
            partial(launches, rank),
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not any(each.told.is_set() for each in heard):
        if all(sum(peer.known for peer in list(each._connections.peers.values())) == 2 for each in rings):
            break
        time.sleep(0.01)
    return rings, heard


@pytest.mark.parametrize("may_be_unreached", [False, True])
def test_a_next_rank_that_is_there_and_cannot_be_reached_ends_the_ring_unless_that_is_known(
    may_be_unreached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one connection alone cannot be made, a ring that ends for it would end again after every vote."""

    def unreachable(address: str, port: int) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(ring_connections, "start_connecting", unreachable)
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = [Heard(), Heard()]
    rings = [
        LivenessRing(
            store,
            rank,
            2,
            GroupFailures(),
            heard[rank],
            waited=lambda: 0.0,
            join_seconds=1.0,
            may_be_unreached=may_be_unreached,
        )
        for rank in range(2)
    ]
    dialers = [each._dialer.next for each in rings]
    deadline = time.monotonic() + SECONDS
    while any(each.checks for each in dialers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(each.checks for each in dialers)  # the last one was made
    if may_be_unreached:
        assert not any(each.told.wait(0.5) for each in heard)
    else:
        assert all(each.told.wait(SECONDS) for each in heard)
        assert any("is unreachable" in str(each.error) for each in heard)  # the other may see that its port is closed
    for each in rings:
        each.close()


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


def test_a_connection_that_breaks_between_two_that_live_is_nobodys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, heard = ring(3)
    monkeypatch.setattr(
        rings[1], "_report_closed", lambda rank, ended: None
    )  # or its port could close before it is looked at
    connection = next(each for each, peer in list(rings[0]._connections.peers.items()) if peer.rank == 1)
    connection.shutdown(socket.SHUT_RDWR)
    assert heard[0].told.wait(SECONDS)
    assert isinstance(error := heard[0].error, PeerFailureError)
    assert (error.failure.source, error.missing) == (BROKEN, ())
    assert str(error) == "lost the connection to rank 1, whose process is still running"
    for each in rings:
        each.close()


def test_a_rank_that_leaves_in_order_is_not_missed() -> None:
    rings, heard = ring(3)
    for each in rings:
        each.close()
    assert not any(each.told.is_set() for each in heard)
    assert not any(each.thread.is_alive() for each in rings)


def test_the_end_of_the_process_ends_the_ring_as_if_it_were_killed() -> None:
    """At exit a thread is asked to end, and joined: the ring of a rank that nobody has closed, too."""
    rings, heard = ring(3)
    rings[1].thread.ask_to_end()
    rings[1].thread.join(SECONDS)
    assert not rings[1].thread.is_alive()
    for neighbour in (0, 2):
        assert heard[neighbour].told.wait(SECONDS)
        assert "rank 1 has ended" in str(heard[neighbour].error)
    for each in rings:
        each.close()


def test_a_shutdown_that_only_the_store_records_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said last to a neighbour is lost where its kernel resets the connection."""
    rings, heard = ring(3)
    monkeypatch.setattr(rings[1]._connections, "send", lambda connection, said: None)
    rings[1].close()
    until(
        lambda: all(sum(peer.known for peer in list(rings[rank]._connections.peers.values())) == 1 for rank in (0, 2))
    )
    assert not any(each.told.wait(0.5) for each in heard)
    for each in rings:
        each.close()


def test_an_abort_in_the_store_reaches_ranks_that_are_no_neighbours() -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = Heard()
    reporter = StoreFailureReporter(store, 0, 1)
    store.set("abort", PeerFailure("rank 7 saw an all-reduce fail", FAILED).packed(7))
    alone = LivenessRing(store, 0, 1, reporter.failures, heard)
    assert heard.told.wait(SECONDS)
    assert "rank 7 saw" in str(heard.error)
    alone.close()


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_came_late_and_ended_before_it_was_reached_is_missed(
    left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour has looked for it often enough by then, and its own connections have come to nobody."""
    monkeypatch.setattr(ring_connections, "JOIN_CHECK_SECONDS", (0.01,))
    store, heard = PollingStore(HashStore(), timedelta(seconds=SECONDS)), Heard()
    reporter = StoreFailureReporter(store, 0, 2)
    alone = LivenessRing(store, 0, 2, reporter.failures, heard, waited=lambda: 0.0)
    until(lambda: not alone._dialer.next.checks)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    if left:
        store.set("left/1", "0")
    store.set("alive/1", json.dumps([port, ["127.0.0.1"], kernel.own_kernel(), "00" * 16]))
    until(lambda: alone._dialer.next.settled)
    assert heard.told.wait(0.5 if left else SECONDS) != left
    if not left:
        assert isinstance(heard.error, PeerFailureError) and heard.error.missing == (1,)
        assert "the process of rank 1 has ended" in str(heard.error)
    alone.close()


def test_who_has_said_it_first_is_told_along_the_ring() -> None:
    size = 4
    rings, heard = ring(size)
    for each in rings:
        each._failures.send = lambda failure: None  # the store says nothing
    rings[2]._failures.report(PeerFailure("an operation has failed", FAILED))
    for rank in range(size):
        assert heard[rank].told.wait(SECONDS)
        error = heard[rank].error
        assert isinstance(error, PeerFailureError)
        assert PeerFailure.unpacked(error.failure.packed(rank)).reported_by == 2
    for each in rings:
        each.close()


def test_what_takes_too_long_is_given_up() -> None:
    rings, heard = ring(2, overdue=lambda: PeerFailure("no progress for 3 s", OVERDUE))
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
    LivenessRing(store, rank, 3, GroupFailures(), heard)
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
def test_a_killed_process_is_noticed(processes: Processes) -> None:
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
    assert not deadline.is_in_flight
    deadline.watch(first.query)
    now = 4.0
    deadline.watch(second.query)
    assert deadline.overdue() is None
    now = 6.0
    reason = "no progress for 5 s: a rank is late, or has issued other collectives"
    assert deadline.overdue() == PeerFailure(reason, OVERDUE)
    first.passed = True
    assert deadline.overdue() is None
    assert deadline.is_in_flight
    second.passed = True
    assert not deadline.is_in_flight


def test_the_device_is_asked_only_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question from another thread breaks the capture of a CUDA graph."""
    now, asked = 0.0, 0

    def query() -> bool:
        nonlocal asked
        asked += 1
        return now > 4.0

    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(timedelta(seconds=5))
    deadline.watch(query)
    now = 4.5
    assert deadline.overdue() is None
    assert asked == 0
    now = 5.0
    assert deadline.overdue() is None
    assert asked == 1


def test_the_loopback_is_tried_last() -> None:
    assert own_addresses()[-1] == "127.0.0.1"
    assert len(set(own_addresses())) == len(own_addresses())


def test_a_host_with_ipv6_alone_has_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interface_addresses", lambda: ["127.0.0.1", "::1", "2001:db8::7", "fe80::1"])
    monkeypatch.setattr(addresses, "ROUTES", ())
    assert own_addresses() == ["2001:db8::7", "127.0.0.1"]


def test_the_ring_listens_on_ipv6_where_there_is_any() -> None:
    rings, _ = ring(2)
    if socket.has_dualstack_ipv6():
        try:
            socket.create_connection(("::1", rings[0]._connections.listener.getsockname()[1]), 5.0).close()
        except OSError as error:
            assert error.errno == errno.EADDRNOTAVAIL  # ::1 is switched off
    for each in rings:
        each.close()


@pytest.mark.parametrize("size", [1, 2, 8, 1024, 2048, 2049, 16_384, 100_000])
def test_the_store_is_asked_no_more_often_than_one_server_can_answer(size: int) -> None:
    seconds = failure_reporter.poll_seconds(size)
    assert size / seconds <= failure_reporter.POLLS_PER_SECOND
    assert seconds == failure_reporter.POLL_SECONDS or size / seconds == failure_reporter.POLLS_PER_SECOND
    if size <= 1024:
        assert seconds == 1.0
    if size <= 16_384:
        assert seconds <= failure_reporter.PATIENCE.total_seconds()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_who_has_left_is_missed_by_a_rank_that_goes_on() -> None:
    started = [5, 5, 5]
    rings, heard = ring(3, launches=lambda rank: started[rank])
    rings[1].close()
    time.sleep(0.1)
    assert not any(each.told.is_set() for each in heard)
    started[2] = 6
    assert heard[2].told.wait(SECONDS)
    assert isinstance(heard[2].error, PeerError)
    assert heard[2].error.missing == (1,)
    assert heard[0].told.wait(SECONDS), "what one neighbour sees goes on along the ring"
    for each in rings:
        each.close()


def test_a_loss_goes_along_the_ring_where_the_store_is_gone() -> None:
    store = Breaking()
    rings, heard = ring(5, store=store)
    store.is_gone = True
    rings[1].close(orderly=False)
    for rank in (0, 2, 3, 4):
        assert heard[rank].told.wait(SECONDS)
        error = heard[rank].error
        assert isinstance(error, PeerError)
        assert error.missing == (1,)
        assert "rank 1 has ended" in str(error)
    for each in rings:
        each.close()


@pytest.mark.usefixtures("quick")
def test_an_error_of_the_device_is_told_to_the_others() -> None:
    def overdue() -> PeerFailure | None:
        if sick.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return None

    sick = threading.Event()
    rings, heard = ring(3, overdue)
    sick.set()
    for each in heard:
        assert each.told.wait(SECONDS)
        assert "illegal memory access" in str(each.error)
    for one in rings:
        one.close()


def test_a_neighbour_that_does_not_answer_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 gets its reply while rank 0 connects to rank 1, whose port drops all attempts: its queue is full."""
    monkeypatch.setattr(ring_connections, "CONNECT_SECONDS", 1e6)
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    with ExitStack() as closing:
        dropping = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dropping.getsockname())
        where = [dropping.getsockname()[1], ["127.0.0.1"], kernel.own_kernel(), "ab" * ring_connections.TOKEN_NBYTES]
        store.set("alive/1", json.dumps(where))
        alone = LivenessRing(store, 0, 3, GroupFailures(), Heard())
        closing.callback(alone.close)
        until(lambda: any(peer.connecting for peer in list(alone._connections.peers.values())))
        port = alone._connections.listener.getsockname()[1]
        neighbour = closing.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
        neighbour.sendall(ring_connections.GREETING + (2).to_bytes(4, "big") + bytes(16))
        assert neighbour.recv(len(ring_connections.GREETING)) == ring_connections.GREETING
        assert any(peer.connecting for peer in list(alone._connections.peers.values()))


HELLO = ring_connections.GREETING + (1).to_bytes(4, "big") + bytes(16)
"""What rank 1 says first; a proof follows, which zeros are not."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said", [b"", b"SSH-2.0-strangers", b"." + bytes(8), bytes(40), HELLO, HELLO + bytes(32)])
def test_other_programs_are_turned_away(said: bytes) -> None:
    rings, heard = ring(2)
    with socket.create_connection(("127.0.0.1", rings[0]._connections.listener.getsockname()[1]), SECONDS) as stranger:
        stranger.sendall(said)
    time.sleep(0.1)
    assert not any(each.told.is_set() for each in heard)
    assert all(each.thread.is_alive() for each in rings)
    for each in rings:
        each.close()


@pytest.mark.usefixtures("quick")
def test_who_cannot_prove_to_be_a_rank_that_has_not_come_yet_is_turned_away() -> None:
    """A rank that is connected is not taken a second time; here the proof alone is in the way."""
    heard = Heard()
    alone = LivenessRing(PollingStore(HashStore(), timedelta(seconds=SECONDS)), 0, 2, GroupFailures(), heard)
    with socket.create_connection(("127.0.0.1", alone._connections.listener.getsockname()[1]), SECONDS) as stranger:
        stranger.sendall(HELLO)
        assert stranger.recv(1024).startswith(ring_connections.GREETING)
        stranger.sendall(bytes(PROOF_NBYTES))
        assert stranger.recv(1) == b""
    assert not any(peer.known for peer in list(alone._connections.peers.values()))
    assert not heard.told.wait(0.1)
    alone.close()


def test_a_crowd_that_calls_while_the_ring_is_busy_keeps_no_neighbour_out() -> None:
    ends = ring_connections.RingConnections(0, 2)
    with ExitStack() as closing, selectors.DefaultSelector() as ends.selector:
        closing.callback(ends.close)
        ends.listen()
        address = ("127.0.0.1", ends.listener.getsockname()[1])
        for _ in range(40):  # none is let in meanwhile
            closing.enter_context(socket.create_connection(address, 2.0))
        ends.accept()
        assert len(ends.peers) == 40


REPLY = ring_connections.GREETING + bytes(NONCE_NBYTES + PROOF_NBYTES)
"""What a rank answers, without its proof."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said", [b"220 ready\r\n", REPLY])
def test_a_service_with_the_port_of_the_next_rank_is_not_taken_for_it(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = Heard()
    with socket.create_server(("127.0.0.1", 0)) as service:
        where = [service.getsockname()[1], ["127.0.0.1"], kernel.own_kernel(), "ab" * ring_connections.TOKEN_NBYTES]
        store.set("alive/1", json.dumps(where))
        alone = LivenessRing(store, 0, 2, GroupFailures(), heard)
        accepted, _ = service.accept()
        with accepted:
            accepted.sendall(said)
        until(lambda: "cannot reach rank 1" in caplog.text)
    assert not heard.told.is_set()
    alone.close()


@pytest.mark.usefixtures("quick")
def test_a_next_rank_that_never_comes_keeps_no_rank_from_an_abort() -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    heard = Heard()
    alone = LivenessRing(store, 0, 2, StoreFailureReporter(store, 0, 2).failures, heard)
    time.sleep(0.1)
    store.set("abort", PeerFailure("rank 7 saw an all-reduce fail", FAILED).packed(7))
    assert heard.told.wait(SECONDS)
    alone.close()


def test_a_store_that_is_gone_is_not_asked_again() -> None:
    store = Breaking()
    reporter = StoreFailureReporter(store, 0, 2)
    store.is_gone = True
    for _ in range(3):
        assert reporter.abort_reason() is None
    assert store.refused == 1


def hold_the_gil(rank: int) -> tuple[str, list[str]]:
    """Rank 1 computes in C for a while, and nothing of Python runs there."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    group = dist.group.WORLD
    assert group is not None
    heard, warned = Heard(), Said()
    logging.getLogger("gradwire").addHandler(warned)
    store = PollingStore(store_of(group), timedelta(seconds=SECONDS))
    own = LivenessRing(store, rank, 2, StoreFailureReporter(store, rank, 2).failures, heard)
    if rank == 1:
        ctypes.PyDLL(None).sleep(HELD_SECONDS)
    dist.barrier()
    own.close()
    return str(heard.error), warned.lines


HELD_SECONDS = 4
"""Longer than a connection may take, and than the store is looked at; keep-alive is the kernel's business."""


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_not_missed(processes: Processes) -> None:
    assert processes(2, hold_the_gil) == [("None", []), ("None", [])]


def diagnose_all(size: int, errors: dict[int, BaseException], words: dict[int, dict[str, Any]]) -> tuple[Any, Any]:
    """What the ranks in `errors` make of it, and how often each of them has asked for another's word."""
    store = HashStore()
    asked: dict[int, int] = dict.fromkeys(errors, 0)

    class Counting(PollingStore):
        def __init__(self, rank: int) -> None:
            super().__init__(store, timedelta(seconds=SECONDS))
            self.rank = rank

        def within(self, timeout: timedelta) -> "Counting":
            return self

        def check(self, keys: Any) -> bool:
            asked[self.rank] += keys[0].startswith("report/")
            return super().check(keys)

    found: dict[int, CollectiveError] = {}

    def run(rank: int) -> None:
        reporter = StoreFailureReporter(Counting(rank), rank, size)
        found[rank] = reporter.diagnose(errors[rank], "an all-reduce", range(size), **words.get(rank, {}))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, asked


def test_one_rank_collects_what_all_have_seen() -> None:
    size = 32
    errors: dict[int, BaseException] = {rank: PeerError("gone", (3,)) for rank in range(size) if rank != 3}
    found, asked = diagnose_all(size, errors, {})
    assert {error.missing for error in found.values()} == {(3,)}
    assert sum(times > 0 for times in asked.values()) == 1


def test_after_a_time_out_the_rank_that_did_not_come_is_named() -> None:
    late = {0: {"launches": 7}, 1: {"launches": 6, "waiting": False}, 2: {"launches": 7}}
    over: dict[int, BaseException] = {rank: OverdueError("no progress for 3 s") for rank in range(3)}
    found, _ = diagnose_all(3, over, late)
    assert [found[rank].missing for rank in range(3)] == [(1,), (), (1,)]
    found, _ = diagnose_all(3, {rank: PeerError("no memory left") for rank in range(3)}, late)
    assert [found[rank].missing for rank in range(3)] == [(), (), ()]
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    for rank in (1, 2):
        word = {"dead": [], "phase": "", "overdue": True, "seen": "", "own": False, "waiting": True, **late[rank]}
        store.set(f"report/{rank}", json.dumps(word))
    ended = PeerError("rank 2 has ended", (2,))  # after it has spoken
    assert StoreFailureReporter(store, 0, 3).diagnose(ended, "an all-reduce", range(3), launches=7).missing == (1,)


def test_of_many_ranks_who_fails_by_itself_is_repeated_by_all() -> None:
    errors: dict[int, BaseException] = {rank: RuntimeError("Connection closed by peer") for rank in range(12)}
    found, _ = diagnose_all(12, {**errors, 9: MemoryError("no room")}, {})
    assert all("MemoryError: no room" in str(error) for error in found.values())


def test_a_rank_that_says_why_it_fails_is_repeated_and_not_missed() -> None:
    """Law: of who fails by itself and ends all hear the reason, whoever saw it end, and nobody else is blamed."""
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    reporters = [StoreFailureReporter(store, rank, 4) for rank in range(4)]
    errors: list[Exception] = [
        PeerError("rank 1 has ended", (1,)),
        MemoryError("no room"),
        RuntimeError("Connection closed by peer"),
    ]
    found: dict[int, CollectiveError] = {}

    def run(rank: int) -> None:
        found[rank] = reporters[rank].diagnose(errors[rank], "an all-reduce", range(4))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
    threads[1].start()
    until(lambda: store.check(["abort"]))
    until(lambda: reporters[3].abort_reason() is not None)
    errors.append(PeerError(reporters[3].abort_reason() or ""))
    for rank in (0, 2, 3):
        threads[rank].start()
    for thread in threads:
        thread.join(SECONDS)
    full, closed, ended = (
        "MemoryError: no room",
        "RuntimeError: Connection closed by peer",
        "PeerError: rank 1 has ended",
    )
    of_0, of_1, of_2 = (f"rank {rank} saw an all-reduce fail: {saw}" for rank, saw in enumerate((ended, full, closed)))
    assert {rank: (error.missing, str(error).partition("missing. Cause: ")[2]) for rank, error in found.items()} == {
        0: ((), f"{ended}; {of_1}; {of_2}"),
        1: ((), f"{full}; {of_2}; {of_0}"),
        2: ((), f"{closed}; {of_1}; {of_0}"),
        3: ((), f"{of_1}; {of_2}; {of_0}"),
    }


def test_a_collector_that_is_lost_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reporter, "PATIENCE", timedelta(seconds=-1.0))
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    store.set("collector", "1")
    error = StoreFailureReporter(store, 0, 2).diagnose(PeerError("gone"), "an all-reduce", range(2))
    assert error.missing == (1,)


@pytest.mark.parametrize("ends", [True, False])
def test_silent_ranks_are_called_and_only_who_has_ended_is_missed(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Nobody waits until its patience ends for a process that has; one that answers is waited for."""
    monkeypatch.setattr(failure_reporter, "PATIENCE", timedelta(hours=1))
    monkeypatch.setattr(failure_reporter, "PROBE_AFTER", timedelta(0))
    monkeypatch.setattr(failure_reporter, "poll_seconds", lambda size: 0.0)
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    call = PeerTable.probe
    word = {"dead": [], "phase": "", "launches": 0, "waiting": True, "overdue": False, "seen": "", "own": False}

    def call_and_say(self: PeerTable, ranks: Any) -> dict[int, str]:
        found = call(self, ranks)
        if not ends:
            store.set("report/2", json.dumps(word))  # after it was called
        return found

    monkeypatch.setattr(PeerTable, "probe", call_and_say)
    living = ProbeServer.open()
    with socket.create_server(("127.0.0.1", 0)) as ended:
        gone = ended.getsockname()[1]
    store.set("address/1", json.dumps([living.port, ["127.0.0.1"], kernel.own_kernel()]))
    store.set("address/2", json.dumps([gone if ends else living.port, ["127.0.0.1"], kernel.own_kernel()]))
    living.register("start", 1)
    living.register("start", 2)
    store.set("report/1", json.dumps(word))
    reporter = StoreFailureReporter(store, 0, 3, peer_table=PeerTable("start", 0, {}))
    errors: list[CollectiveError] = []
    thread = threading.Thread(
        target=lambda: errors.append(reporter.diagnose(PeerError("gone"), "an all-reduce", range(3))), daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    assert [error.missing for error in errors] == [(2,) if ends else ()]
    for rank in (1, 2):
        living.unregister("start", rank)
    living.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits for a thread's deed; how long it takes decides nothing."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_refused_connection_is_an_end_only_beside_a_rank_that_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "of_others", list)
    store = HashStore()
    living = ProbeServer.open()
    with socket.create_server(("127.0.0.1", 0)) as ended:
        gone = ended.getsockname()[1]
    for rank, port, host in (
        (1, gone, "one host"),
        (2, living.port, "one host"),
        (3, living.port, "other"),
        (4, gone, "one host"),
    ):
        store.set(f"address/{rank}", json.dumps([port, ["127.0.0.1"], host]))
        living.register("start", rank)
    reporter = StoreFailureReporter(store, 0, 6, peer_table=PeerTable("start", 0, {}))

    def found(rank: int, words: list[int]) -> str | None:
        return reporter._addresses_of({rank}, words).probe([rank]).get(rank)

    assert found(1, [3, 2]) == probe.EXITED
    assert found(1, [3]) == probe.REFUSED  # a firewall of that host may reject
    assert found(1, [4]) == probe.REFUSED
    assert found(5, [2]) is None
    for rank in (1, 2, 3, 4):
        living.unregister("start", rank)
    living.close()


def test_a_process_that_was_held_up_gives_its_neighbours_their_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(liveness, "FROZEN_SECONDS", 1.0)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ends = ring_connections.RingConnections(0, 2)
    here, there = socket.socketpair()
    there.settimeout(SECONDS)
    ends.peers[here] = ring_connections.PeerConnection(1, True, ends.token, 0.0, known=True, last=clock[0])
    heartbeat = liveness.Heartbeat(0, ends, 0.05, lambda: 10 * SECONDS)

    def goes_by(seconds: float) -> None:
        """The clock goes on, and the heartbeat has seen it: what it says twice, it has said once after that."""
        clock[0] += seconds
        there.setblocking(False)
        with suppress(BlockingIOError):
            there.recv(1 << 16)
        there.settimeout(SECONDS)
        assert there.recv(1) + there.recv(1) == 2 * liveness.ALIVE

    goes_by(2.0)
    heartbeat.raise_if_silent()
    while clock[0] < 103.0:
        heartbeat.raise_if_silent()
        goes_by(0.099)
    goes_by(0.099)
    with pytest.raises(PeerFailureError, match="no heartbeat from rank 1 for 1 s: its process is stopped"):
        heartbeat.raise_if_silent()
    heartbeat.end()
    ends.close()
    there.close()
