"""Law: where no thread can start any more, a feature is off or the caller has the error; nobody waits for a thread.

The user or the container may have reached its limit: `ulimit -u`, pids.max of a cgroup.
"""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.bench.doctor import arrival
from gradwire.bench.doctor import network as doctor_network
from gradwire.bench.doctor.split import StepSplit
from gradwire.comms.backend.node_collectives import NodeCollectives
from gradwire.comms.bootstrap import threads
from gradwire.comms.bootstrap.addresses import _LookUps
from gradwire.comms.bootstrap.compat import HashStore, TCPStore
from gradwire.comms.bootstrap.failures import GroupFailures
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.bootstrap.probe import ProbeServer
from gradwire.comms.bootstrap.store import PollingStore, _Client
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.elastic.joining import Requests
from gradwire.comms.errors import PeerError
from gradwire.comms.observe.metrics import Metrics
from gradwire.comms.observe.stall import StallWatch, WatchedJob
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.comms.transport.parallel_tcp import Streams
from gradwire.comms.watch.names import WatchedModels
from support.failing_lanes import all_reduce_errors
from support.nccl import FakeNcclWorld

SECONDS = 20.0
REFUSED = "can't start new thread"

Refuse = Callable[[str], None]
"""Lets no thread start any more whose name has these words."""


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    start = threading.Thread.start

    def starting(words: str) -> None:
        def starts(thread: threading.Thread) -> None:
            if isinstance(thread, BackgroundThread) and words in thread.name:
                raise RuntimeError(REFUSED)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)

    return starting


def test_a_thread_that_cannot_start_is_handled_as_one_that_fails(
    refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("")
    found: list[BaseException] = []
    thread = BackgroundThread("test", fail_if_called, without="nothing is done any more", on_failure=found.append)
    thread.start()
    thread.join()
    assert not thread.is_alive() and thread not in threads._running
    assert [str(each) for each in found] == [REFUSED]
    assert "nothing is done any more" in caplog.text


def fail_if_called() -> None:
    raise AssertionError("it runs")


def test_what_would_run_in_a_thread_is_raised_to_the_caller(refuse: Refuse) -> None:
    refuse("")
    with pytest.raises(RuntimeError, match=REFUSED):
        threads.outcome_of(threads.in_thread(fail_if_called, "test").get(timeout=SECONDS))
    with pytest.raises(RuntimeError, match=REFUSED):
        threads.call_each(str, [1, 2], "test")


class Waits:
    """In place of a communicator, or of an executor whose launches are watched."""

    rank, size, launches = 0, 2, 1

    def oldest(self) -> None: ...


def test_a_communicator_of_nccl_is_left_and_later_collectives_have_the_reason(refuse: Refuse) -> None:
    refuse("NCCL")
    (backend,) = FakeNcclWorld(1).backends()
    transport = NcclTransport(backend, 0, 1)
    with pytest.raises(RuntimeError, match=REFUSED):
        transport.connect(torch.device("cpu"), timedelta(seconds=SECONDS))
    transport.abort("a rank is lost")
    with pytest.raises(PeerError, match="a rank is lost"):
        transport.all_reduce(torch.ones(1))
    transport.close(SECONDS)


def test_collectives_of_a_node_and_requests_to_the_store_raise(refuse: Refuse) -> None:
    refuse("")
    made = NodeCollectives(Waits(), HashStore(), "test")  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            made.broadcast(torch.ones(1), 0).wait()
    made.close()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match=REFUSED):
        _Client("the store").ask("set", lambda: store.set("a", "1"), SECONDS)


def test_an_all_reduce_without_a_lane_fails_on_every_rank(refuse: Refuse) -> None:
    refuse(" lane ")
    assert all(REFUSED in said for said in all_reduce_errors(timedelta(seconds=SECONDS)))


def test_exchanges_fail_and_the_other_ranks_see_closed_connections(refuse: Refuse) -> None:
    refuse("streams")
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
    mine = Streams({1: [own]}, timedelta(seconds=SECONDS), None)
    with pytest.raises(RuntimeError, match=REFUSED):
        mine.exchange([(1, torch.ones(4), torch.ones(4))])
    theirs.settimeout(SECONDS)
    assert theirs.recv(1) == b""
    theirs.close()
    assert mine.drain(SECONDS)


def test_features_that_only_watch_are_off(refuse: Refuse, tmp_path: Path) -> None:
    refuse("")
    store = HashStore()
    assert _LookUps().find("host", SECONDS) == []
    metrics = Metrics(None, 0, "127.0.0.1", 0.0)
    assert metrics.port is None
    metrics.close()
    models = WatchedModels()
    models.search(10.0)
    assert models.name("default", []) == []
    watch = StallWatch(store, WatchedJob(0, ("a", "b"), (0, 1), {}), Waits(), 1.0)  # type: ignore[arg-type]
    assert watch._closed.is_set()
    watch.close()
    requests = Requests(store, timedelta(seconds=SECONDS), {}, {})
    assert requests.poll(lambda newcomer: None) == requests.poll(lambda newcomer: None) == 0
    server = ProbeServer.open()
    server.close()
    lost: list[Any] = []
    ring = LivenessRing(
        PollingStore(store, timedelta(seconds=SECONDS)), 0, 2, GroupFailures(), lost.append, waited=lambda: 0.0
    )
    ring.close()
    assert lost == []


def test_a_doctor_goes_on_without(refuse: Refuse, tmp_path: Path) -> None:
    refuse("doctor")
    notice = arrival.StartNotice("127.0.0.1", 1, 0)
    assert notice._done.is_set()
    notice.end()
    split = StepSplit(tmp_path / "split")
    split.begin()
    split.write(1, last=True)
    assert not (tmp_path / "split").exists()
    listener = doctor_network.Listener()
    assert listener._tcp.fileno() == listener._udp.fileno() == -1
    listener.close()


WATCH = f"""
import os, signal, threading, time
import gradwire
from gradwire.comms.bootstrap.threads import BackgroundThread

start = threading.Thread.start


def starts(thread):
    if isinstance(thread, BackgroundThread):
        raise RuntimeError("{REFUSED}")
    start(thread)


threading.Thread.start = starts
assert gradwire.watch(1.0).report is None
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


@pytest.mark.slow
def test_a_watch_that_cannot_start_leaves_sigterm_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "nothing is watched any more in this process" in done.stderr
