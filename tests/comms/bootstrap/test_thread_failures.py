"""Law: a thread that dies takes nothing with it: its feature is off, nobody waits for it, and the process can be ended.

An exception is planted in each call that a thread makes, one after the other.
"""

import ast
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.bench.doctor import arrival
from gradwire.bench.doctor import network as doctor_network
from gradwire.bench.doctor.split import StepSplit
from gradwire.comms.backend.node_collectives import NodeCollectives
from gradwire.comms.bootstrap import liveness, probe
from gradwire.comms.bootstrap import store as stores
from gradwire.comms.bootstrap.addresses import _LookUps
from gradwire.comms.bootstrap.compat import HashStore, TCPStore
from gradwire.comms.bootstrap.failures import GroupFailures
from gradwire.comms.bootstrap.kernel import LISTENS, listener_state, own_kernel
from gradwire.comms.bootstrap.liveness import Heartbeat, LivenessRing
from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.probe import UNANSWERED, PeerAddress, PeerTable, ProbeServer
from gradwire.comms.bootstrap.ring_connections import Dialer, MemberRecords, RingConnections
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.elastic import joining
from gradwire.comms.elastic.joining import Requests
from gradwire.comms.errors import PeerError
from gradwire.comms.lanes import Lanes
from gradwire.comms.observe import stall
from gradwire.comms.observe.metrics import Metrics
from gradwire.comms.observe.stall import StallWatch, WatchedJob
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.comms.watch.names import WatchedModels
from support.failing_lanes import all_reduce_errors
from support.nccl import FakeNcclWorld

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 20.0
PLANTED = MemoryError("planted")


def fails(*arguments: object, **named: object) -> Any:
    raise PLANTED


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator["queue.SimpleQueue[BackgroundThread]"]:
    """The threads whose handler has run; and none may have got past it."""
    found: queue.SimpleQueue[BackgroundThread] = queue.SimpleQueue()
    died: list[object] = []
    handle = BackgroundThread._fail

    def note(thread: BackgroundThread, error: BaseException) -> None:
        handle(thread, error)
        found.put(thread)

    monkeypatch.setattr(BackgroundThread, "_fail", note)
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield found
    assert died == []


class Communicator:
    """In place of the one that made a node's collectives."""

    rank, size = 0, 2

    def abort(self, reason: str) -> None: ...


class Segment:
    """In place of shared memory."""

    error: Exception | None = None

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.error is not None:
            raise self.error

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def of_node(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> NodeCollectives:
    segment = Segment()
    segment.error = error
    made = NodeCollectives(Communicator(), HashStore(), "test")  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_connect", lambda: segment)
    return made


@pytest.mark.parametrize("call", ["_run", "Communicator.abort", "Segment.broadcast"])
def test_collectives_of_a_node_fail_and_nobody_waits(monkeypatch: pytest.MonkeyPatch, ended: Any, call: str) -> None:
    made = of_node(monkeypatch, PeerError("gone") if call == "Communicator.abort" else None)
    if call == "_run":
        monkeypatch.setattr(made, call, fails)
    elif call == "Communicator.abort":
        monkeypatch.setattr(Communicator, "abort", fails)
    else:
        monkeypatch.setattr(Segment, "broadcast", fails)
    first = made.broadcast(torch.ones(1), 0)
    with pytest.raises(RuntimeError, match="gone" if call == "Communicator.abort" else "planted"):
        first.wait()
    if call != "Segment.broadcast":  # what a collective raises ends it alone
        ended.get(timeout=SECONDS)
        with pytest.raises(RuntimeError, match="planted"):
            made.broadcast(torch.ones(1), 0).wait()
    made.close()


def test_what_was_submitted_behind_a_collective_that_ends_the_thread_fails_too(
    monkeypatch: pytest.MonkeyPatch, ended: Any
) -> None:
    made, entered, go_on = of_node(monkeypatch), threading.Event(), threading.Event()

    def fail_later(call: object) -> None:
        entered.set()
        go_on.wait(SECONDS)
        raise PLANTED

    monkeypatch.setattr(made, "_run", fail_later)
    first = made.broadcast(torch.ones(1), 0)
    assert entered.wait(SECONDS)
    second = made.broadcast(torch.ones(1), 0)
    go_on.set()
    for each in (first, second):
        with pytest.raises(RuntimeError, match="planted"):
            each.wait()
    ended.get(timeout=SECONDS)
    made.close()


@pytest.fixture
def asked() -> Iterator[tuple[stores._Client, TCPStore]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield stores._Client("the store"), store


def test_a_question_to_the_store_is_answered_and_the_next_one_starts_a_thread(
    monkeypatch: pytest.MonkeyPatch, ended: Any, asked: tuple[stores._Client, TCPStore]
) -> None:
    client, store = asked
    with monkeypatch.context() as planted:
        planted.setattr(stores._Request, "run", fails)
        with pytest.raises(RuntimeError, match="the thread that makes requests to the store has failed"):
            client.ask("set", lambda: store.set("a", "1"), SECONDS)
        ended.get(timeout=SECONDS)
    client.ask("set", lambda: store.set("a", "1"), SECONDS)
    assert client.ask("get", lambda: store.get("a"), SECONDS) == b"1"


@pytest.mark.parametrize("call", ["next", "close"])
def test_a_probe_server_that_fails_does_not_look_like_a_process_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, ended: Any, call: str
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(PendingConnections, "next", fails)
    if call == "close":
        monkeypatch.setattr(PendingConnections, "close", fails)
    server = ProbeServer()
    server.register("start", 1)
    ended.get(timeout=SECONDS)
    there = PeerTable("start", 0, {1: PeerAddress(server.port, ("127.0.0.1",), own_kernel())})
    assert there.probe([1]) == {1: UNANSWERED}
    assert listener_state(own_kernel(), server.port, ()) == LISTENS
    server._users = 1
    server.close()
    assert listener_state(own_kernel(), server.port, ()) != LISTENS


def test_a_client_of_the_probe_server_that_cannot_be_answered_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, ended: Any
) -> None:
    server, answer, called = ProbeServer(), ProbeServer._answer, []

    def fail_once(*arguments: Any) -> None:
        called.append(1)
        (fails if len(called) == 1 else answer)(*arguments)

    monkeypatch.setattr(ProbeServer, "_answer", fail_once)
    server.register("start", 1)
    there = PeerTable("start", 0, {1: PeerAddress(server.port, ("127.0.0.1",), own_kernel())})
    assert there.probe([1]) != there.probe([1]) == {1: probe.ANSWERS}
    server._users = 1
    server.close()
    assert ended.empty()


def test_metrics_are_not_served_any_more(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    monkeypatch.setattr(PendingConnections, "next", fails)
    made = Metrics(None, 0, "127.0.0.1", 0.0)
    ended.get(timeout=SECONDS)
    assert made.port is None
    made.close()


def test_names_of_parameters_are_left_out(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    models = WatchedModels()
    monkeypatch.setattr(models, "_find", fails)
    models.search(10.0)
    ended.get(timeout=SECONDS)
    models.search(1e9)
    assert models.name("default", []) == [] and ended.empty()


class Executor:
    """In place of the one whose launches are watched."""

    launches = 1

    def oldest(self) -> None: ...


@pytest.mark.parametrize("error", [PLANTED, ValueError("no JSON")])
def test_nobody_says_what_hangs_any_more(monkeypatch: pytest.MonkeyPatch, ended: Any, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(stall, "SHORTEST_POLL_SECONDS", 0.001)
    monkeypatch.setattr(Executor, "oldest", lambda executor: fail())
    job = WatchedJob(0, ("a", "b"), (0, 1), {})
    watch = StallWatch(HashStore(), job, Executor(), 0.001)  # type: ignore[arg-type]
    ended.get(timeout=SECONDS)
    assert watch._closed.is_set()
    watch.close()


def test_nobody_joins_any_more_and_who_waits_is_told(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.001)
    store = HashStore()
    store.add("join/count", 1)
    requests = Requests(store, timedelta(seconds=SECONDS), {}, {})
    polls: list[object] = []
    poll: Callable[[], object] = requests._poll_store

    def fail_later() -> None:
        polls.append(poll())
        if len(polls) == 2:
            raise PLANTED

    monkeypatch.setattr(requests, "_poll_store", fail_later)
    assert requests.poll(lambda process: None) == 0
    ended.get(timeout=SECONDS)
    assert b"planted" in store.get("join/1/answer")
    assert requests.poll(lambda process: None) == 0


@pytest.mark.parametrize("call", ["_accept", "_echo_packets"])
def test_a_doctor_that_cannot_answer_closes_its_port(monkeypatch: pytest.MonkeyPatch, ended: Any, call: str) -> None:
    monkeypatch.setattr(doctor_network.Listener, call, fails)
    listener = doctor_network.Listener()
    ended.get(timeout=SECONDS)
    failed = listener._tcp if call == "_accept" else listener._udp
    assert failed.fileno() == -1
    listener.close()


@pytest.mark.parametrize("call", ["_run", "_serve", "_step", "set_flush_denormal"])
def test_what_waits_for_a_lane_is_told(monkeypatch: pytest.MonkeyPatch, ended: Any, call: str) -> None:
    where = torch if call == "set_flush_denormal" else Lanes if call == "_run" else LaneExecutor
    monkeypatch.setattr(where, "serve" if call == "_run" else call, fails)
    assert all("planted" in said for said in all_reduce_errors())
    ended.get(timeout=SECONDS)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a thread's deed; how long it takes decides nothing."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("call", ["_run", "_send once", "_send"])
def test_heartbeats_go_on_from_the_thread_of_the_ring_and_end_no_ring(
    monkeypatch: pytest.MonkeyPatch, ended: Any, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(liveness, "poll_seconds", lambda size: 0.02)
    calls: list[object] = []

    def fails_at_first(heartbeat: Any, *, send: Any = Heartbeat._send) -> None:
        calls.append(heartbeat)
        if call == "_send" or calls.count(heartbeat) == 1:  # in its own thread
            raise PLANTED
        send(heartbeat)

    if call == "_run":
        monkeypatch.setattr(Heartbeat, "_run", fails)
    else:
        monkeypatch.setattr(Heartbeat, "_send", fails_at_first)
    store, lost = PollingStore(HashStore(), timedelta(seconds=SECONDS)), list[Exception]()
    rings = [LivenessRing(store, rank, 2, GroupFailures(), lost.append, waited=lambda: 0.0) for rank in range(2)]
    for _ in rings:
        ended.get(timeout=SECONDS)
    if call == "_send":
        until(lambda: caplog.text.count("heartbeats cannot be sent") > 4)
    else:
        connected = time.monotonic()
        until(
            lambda: all(
                sum(peer.known and peer.last > connected for peer in list(ring._connections.peers.values())) == 2
                for ring in rings
            )
        )
    assert not lost and all(ring.thread.is_alive() for ring in rings)
    for ring in rings:
        ring.close()
    assert not lost


@pytest.mark.parametrize("call", ["DefaultSelector", "listen", "publish", "advance", "_poll"])
def test_a_ring_that_fails_closes_its_connections(monkeypatch: pytest.MonkeyPatch, ended: Any, call: str) -> None:
    owner = {"DefaultSelector": selectors, "listen": RingConnections, "_poll": LivenessRing, "advance": Dialer}
    monkeypatch.setattr(owner.get(call, MemberRecords), call, fails)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    ring = LivenessRing(store, 0, 2, GroupFailures(), told.put, waited=lambda: 0.0)
    if call in ("DefaultSelector", "listen"):
        ended.get(timeout=SECONDS)
    else:  # this rank's callers hear of it, and so do the other ranks
        assert "planted" in str(told.get(timeout=SECONDS))
    ring.thread.join(SECONDS)
    assert ring._connections.listener.fileno() == -1
    assert ring._heartbeat is not None and ring._heartbeat._ended.is_set()
    ring.close()


def test_a_communicator_of_nccl_that_cannot_be_aborted_is_left(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    (backend,) = FakeNcclWorld(1).backends()
    monkeypatch.setattr(backend, "abort", fails)
    transport = NcclTransport(backend, 0, 1)
    transport.abort("a rank is lost")
    ended.get(timeout=SECONDS)
    with pytest.raises(PeerError, match="a rank is lost"):
        transport.all_reduce(torch.ones(1))
    assert not transport.is_done()
    transport.close(SECONDS)


def test_nccl_that_cannot_connect_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    (backend,) = FakeNcclWorld(1).backends()
    transport = NcclTransport(backend, 0, 1)
    monkeypatch.setattr(transport, "_connect", fails)
    with pytest.raises(MemoryError, match="planted"):
        transport.connect(torch.device("cpu"), timedelta(seconds=SECONDS))


def test_a_name_that_cannot_be_looked_up_has_no_address(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    monkeypatch.setattr(_LookUps, "_look_up", fails)
    assert _LookUps().find("host", SECONDS) == []
    ended.get(timeout=SECONDS)


def test_a_doctor_whose_start_is_not_told_goes_on(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    monkeypatch.setattr(arrival.StartNotice, "_run", fails)
    notice = arrival.StartNotice("127.0.0.1", 1, 0)
    ended.get(timeout=SECONDS)
    assert notice._done.is_set()
    notice.end()


def test_a_doctor_that_cannot_look_at_steps_writes_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, ended: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(StepSplit, "_look", fails)
    split = StepSplit(tmp_path / "split")
    ended.get(timeout=SECONDS)
    split.begin()
    split.write(1, last=True)
    assert not (tmp_path / "split").exists()


def test_a_measurement_that_fails_hangs_up(monkeypatch: pytest.MonkeyPatch, ended: Any) -> None:
    monkeypatch.setattr(doctor_network.Listener, "_serve", fails)
    listener = doctor_network.Listener()
    with socket.create_connection(("127.0.0.1", listener.ports[0]), SECONDS) as caller:
        caller.sendall(doctor_network._CONTROL + b"0" * doctor_network.SESSION_NBYTES)
        assert caller.recv(1) == b""
    ended.get(timeout=SECONDS)
    listener.close()


THREADS = {
    "bench/doctor/arrival.py": ["test_a_doctor_whose_start_is_not_told_goes_on"],
    "bench/doctor/examine.py": ["errors of gloo are a finding"],
    "bench/doctor/network.py": [
        "test_a_doctor_that_cannot_answer_closes_its_port",
        "test_a_measurement_that_fails_hangs_up",
    ],
    "bench/doctor/script.py": ["a file is missing"],
    "bench/doctor/split.py": ["test_a_doctor_that_cannot_look_at_steps_writes_nothing_of_them"],
    "comms/backend/node_collectives.py": ["test_collectives_of_a_node_fail_and_nobody_waits"],
    "comms/bootstrap/addresses.py": ["test_a_name_that_cannot_be_looked_up_has_no_address"],
    "comms/bootstrap/liveness.py": [
        "test_a_ring_that_fails_closes_its_connections",
        "test_heartbeats_go_on_from_the_thread_of_the_ring_and_end_no_ring",
    ],
    "comms/bootstrap/probe.py": ["test_a_probe_server_that_fails_does_not_look_like_a_process_that_has_ended"],
    "comms/bootstrap/store.py": ["test_a_question_to_the_store_is_answered_and_the_next_one_starts_a_thread"],
    "comms/bootstrap/threads.py": ["test_threads.py hands what they raise to the caller"],
    "comms/elastic/joining.py": ["test_nobody_joins_any_more_and_who_waits_is_told"],
    "comms/observe/metrics.py": ["test_metrics_are_not_served_any_more"],
    "comms/observe/stall.py": ["test_nobody_says_what_hangs_any_more"],
    "comms/run/lane_executor.py": ["test_what_waits_for_a_lane_is_told"],
    "comms/transport/nccl.py": [
        "test_nccl_that_cannot_connect_is_raised_where_it_is_waited_for",
        "test_a_communicator_of_nccl_that_cannot_be_aborted_is_left",
    ],
    "comms/transport/parallel_tcp.py": ["test_parallel_tcp.py: test_a_thread_that_fails_ends_every_wait_at_once"],
    "comms/watch/names.py": ["test_names_of_parameters_are_left_out"],
    "comms/watch/watch.py": ["test_a_watch_that_fails_leaves_sigterm_to_the_system"],
}
"""Module -> for each thread that it starts, the test that plants exceptions in it, or why there is nothing to test."""


def test_exceptions_are_planted_in_every_thread() -> None:
    """A new thread gets a test of its failure, and a line in `THREADS`."""
    found: dict[str, int] = {}
    for file in (*ROOT.glob("bench/**/*.py"), *ROOT.glob("comms/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BackgroundThread":
                where = str(file.relative_to(ROOT))
                found[where] = found.get(where, 0) + 1
    assert found == {where: len(tests) for where, tests in THREADS.items()}
    named = [each for tests in THREADS.values() for each in tests if each.startswith("test_") and " " not in each]
    assert set(named) <= globals().keys()


WATCH = """
import os, signal, sys, threading, time
import gradwire
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.watch.signals import Signals
from gradwire.comms.watch.watch import Watch

MOST_PROBES = sys.argv[1:]


class Session:
    report = None
    is_over = is_unanswered = leaves = waits = False

    def look(self): ...


def fails(*arguments, **named):
    raise MemoryError("planted")


def case(call):
    kind, name = {"Watch": Watch, "Signals": Signals, "Session": Session}[call.split(".")[0]], call.split(".")[1]
    setattr(Watch, "_connect", lambda watch, group: Session())
    if name not in ("_answer_alone", "_group"):
        setattr(Watch, "_group", lambda watch: object())
    setattr(kind, name, fails)
    handled = threading.Event()
    handle = BackgroundThread._fail
    BackgroundThread._fail = lambda thread, error: (handle(thread, error), handled.set())
    found = gradwire.watch(1.0)
    assert handled.wait(20), call
    assert found._session is None and found.report is None
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
    os._exit(77)


for call in MOST_PROBES:
    child = os.fork()
    if child == 0:
        try:
            case(call)
        finally:
            os._exit(78)
    print(call, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
CALLS_OF_THE_WATCH = (
    "Watch._group",
    "Watch._answer_alone",
    "Watch._connect",
    "Watch._open_metrics",
    "Watch._answer",
    "Watch._export",
    "Session.poll",
    "Signals.hold_abort",
    "Signals.come",
)


@pytest.mark.slow
def test_a_watch_that_fails_leaves_sigterm_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *CALLS_OF_THE_WATCH], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.splitlines() == [f"{call} -15" for call in CALLS_OF_THE_WATCH], done.stderr
    assert done.stderr.count("nothing is watched any more in this process") == len(CALLS_OF_THE_WATCH)
