"""Law: whoever calls a port of a job, and whatever he says or does not say, who belongs there is heard."""

import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap import pending_connections
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failures import FAILED, GroupFailures, PeerFailure
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.probe import (
    ANSWERS,
    EXITED,
    NOTIFY,
    PeerAddress,
    PeerTable,
    ProbeServer,
    _digest,
    _secret,
)
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.proof import proof_of
from gradwire.comms.errors import PeerError
from gradwire.comms.transport import parallel_tcp
from support.processes import Processes

SECONDS = 30.0
"""For what must happen at last; how long it takes decides nothing."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many may be silent, for ever: what counts is that nobody waits for them."""
    monkeypatch.setattr(pending_connections, "MOST_PENDING", 8)
    monkeypatch.setattr(pending_connections, "PENDING_SECONDS", 1e6)
    return 8


@pytest.fixture
def callers() -> Iterator["Callers"]:
    """Calls ports, and hangs up at the end."""
    with ExitStack() as until:
        yield Callers(until)


class Callers:
    """Connections to a port of this machine."""

    def __init__(self, until: ExitStack) -> None:
        self._until = until

    def call(self, port: int, said: bytes = b"") -> socket.socket:
        made = self._until.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
        made.sendall(said)
        return made

    def crowd(self, port: int, count: int, said: bytes = b"") -> list[socket.socket]:
        return [self.call(port, said) for _ in range(count)]


def is_turned_away(caller: socket.socket) -> bool:
    """Waits for it."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


def heard(one: PendingConnections, count: int) -> list[bytes]:
    """What so many said who have said all."""
    found: list[bytes] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline
        for connection, said in one.next(0.1):
            found.append(said)
            connection.close()
    return found


def test_who_speaks_is_heard_whoever_is_silent_and_nothing_more_is_read(
    listener: socket.socket, callers: Callers, few: int
) -> None:
    port = listener.getsockname()[1]
    one = PendingConnections(listener, lambda said: 4 - len(said))
    silent = callers.crowd(port, few // 2)
    slow = callers.call(port, b"sl")
    callers.call(port, b"name and more")
    assert heard(one, 1) == [b"name"]
    slow.sendall(b"ow")
    assert heard(one, 1) == [b"slow"]
    silent[0].close()
    assert heard(one, 1) == [b""]
    one.close()
    assert all(is_turned_away(each) for each in silent[1:])


def test_of_too_many_the_oldest_are_turned_away(listener: socket.socket, callers: Callers, few: int) -> None:
    port = listener.getsockname()[1]
    one = PendingConnections(listener, lambda said: 4 - len(said))
    silent = callers.crowd(port, 3 * few)
    callers.call(port, b"name")
    assert heard(one, 1) == [b"name"]
    assert all(is_turned_away(each) for each in silent[: 2 * few])
    silent[-1].sendall(b"late")
    assert heard(one, 1) == [b"late"]
    one.close()


def test_callers_that_are_greeted_first_have_time_to_answer_in_a_crowd(
    listener: socket.socket, callers: Callers, few: int
) -> None:
    """More than may be silent at a time call at once, and answer what they are greeted with: all are heard."""
    one = PendingConnections(listener, lambda said: 4 - len(said), lambda: b"hello")
    crowd = callers.crowd(listener.getsockname()[1], 3 * few)
    found: list[bytes] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < 3 * few and time.monotonic() < deadline:
        for connection, said in one.next(0.01):
            found.append(said)
            connection.close()
        for each in crowd:
            each.setblocking(False)
            try:
                if each.recv(5) == b"hello":
                    each.send(b"name")
            except BlockingIOError:
                continue
    assert found == [b"helloname"] * (3 * few)
    one.close()


def test_who_is_silent_for_long_is_turned_away(
    listener: socket.socket, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_connections, "PENDING_SECONDS", 0.0)
    one = PendingConnections(listener, lambda said: 4 - len(said))
    silent = callers.call(listener.getsockname()[1])
    assert one.next(SECONDS) == []
    assert is_turned_away(silent)
    one.close()


def without_descriptors(_: int) -> list[str]:
    """What a probe server of a process says that had no descriptor left for a while."""
    server = ProbeServer.open()
    server.register("start", 0)
    directory = PeerTable("start", 1, {0: PeerAddress(server.port, ("127.0.0.1",))})
    found = [directory.probe([0])[0]]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    called = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # what is open stays open
    with pytest.raises(OSError) as full:
        socket.socket()
    assert full.value.errno == errno.EMFILE
    called.connect(("127.0.0.1", server.port))
    called.sendall(bytes(33))  # a whole digest, that of nothing: the next one is waited for at once
    time.sleep(4 * pending_connections.FULL_NAP_SECONDS)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    found.append(directory.probe([0])[0])
    called.close()
    server.unregister("start", 0)
    found.append(directory.probe([0])[0])
    server.close()
    return found


def test_a_process_without_a_descriptor_left_answers_again_once_there_are_some(processes: Processes) -> None:
    assert processes(1, without_descriptors) == [[ANSWERS, ANSWERS, EXITED]]


DRIPS = b"GET / HTTP/1.1\r\n"


def test_pending_connections_keep_no_rank_from_a_probe_server(callers: Callers, few: int) -> None:
    server = ProbeServer.open()
    server.register("start", 2)
    callers.crowd(server.port, 3 * few)
    callers.crowd(server.port, 3 * few, DRIPS)
    name = _secret("start", 2)
    head = _digest(name) + bytes(16) + NOTIFY
    callers.call(server.port, head + b"\xff" * 4)  # 4 GB of words
    for word in (b"[" * 1000, b"3", b"[1, 2]", b"\xff", b'["x", "failed", [1e999], null]'):
        word = len(word).to_bytes(4, "big") + word
        callers.call(server.port, head + word + bytes(32))  # without a proof
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as proved:
            greeting = proved.recv(64)
            proved.sendall(head + word + proof_of(name, "caller", greeting, head, word))
            assert is_turned_away(proved)
    directory = PeerTable("start", 1, {2: PeerAddress(server.port, ("127.0.0.1",))}, server=server)
    assert directory.probe([2]) == {2: ANSWERS}
    directory.notify([2], PeerFailure("the reason", FAILED, (3,)))
    deadline = time.monotonic() + SECONDS
    while server.reported_failure("start", 2) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.reported_failure("start", 2) == PeerFailure("the reason", FAILED, (3,), reported_by=1)
    server.unregister("start", 2)
    server.close()


def test_pending_connections_neither_fill_a_ring_nor_keep_it_from_leaving(callers: Callers, few: int) -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    lost: list[list[Exception]] = [[], []]
    told = [threading.Event(), threading.Event()]

    def hear(rank: int) -> Callable[[Exception], None]:
        def note(error: Exception) -> None:
            lost[rank].append(error)
            told[rank].set()

        return note

    rings = [LivenessRing(store, rank, 2, GroupFailures(), hear(rank)) for rank in range(2)]
    port = rings[0]._connections.listener.getsockname()[1]
    silent = callers.crowd(port, 3 * few)
    assert all(is_turned_away(each) for each in silent[: 2 * few])
    assert len(rings[0]._connections.peers) <= few + 4
    assert not any(lost)
    rings[1].close(orderly=False)
    assert told[0].wait(SECONDS)
    assert isinstance(lost[0][0], PeerError)
    rings[0].close()


def test_a_silent_connection_keeps_no_connection_of_a_long_path_waiting(callers: Callers, few: int) -> None:
    listener = parallel_tcp.StreamListener(socket.AF_INET, "127.0.0.1", 64)
    callers.crowd(listener.port, few // 2)
    callers.call(listener.port, b"half")
    deadline = time.monotonic() + SECONDS
    asking = (socket.AF_INET, "127.0.0.1", listener.port, listener.token, 1, 2, deadline, None)
    knocking = threading.Thread(target=parallel_tcp.connect, args=asking)
    knocking.start()
    found = listener.accept({1: 2}, deadline, None)
    knocking.join()
    assert len(found[1]) == 2
    for each in found[1]:
        each.close()
    listener.close()


def has_address(family: socket.AddressFamily, address: str) -> bool:
    """Whether this host has it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def own_ports() -> list[tuple[str, int]]:
    """(address, port) at which this process listens, gloo and the store's server included."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(entry.stat().st_ino)
        except OSError:
            continue
    found = []
    any_6 = "::1" if has_address(socket.AF_INET6, "::1") else "127.0.0.1"  # who listens on all IPv6 hears IPv4, too
    for table, family, loopback in (("tcp", socket.AF_INET, "127.0.0.1"), ("tcp6", socket.AF_INET6, any_6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[9]) in inodes:  # TCP_LISTEN
                address, _, port = words[1].partition(":")
                packed = b"".join(
                    int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)
                )
                found.append((socket.inet_ntop(family, packed) if any(packed) else loopback, int(port, 16)))
    return found


SAID = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096)


def besieged(rank: int) -> tuple[int, int, bytes]:
    """Trains while strangers call every port of every rank from its own host; a rank is killed, the others go on."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 8))
    state = gradwire.HookState(model, elastic=True)
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    held: list[socket.socket] = []

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()

    step()
    ports = own_ports()
    assert ports
    for number in range(12):
        for port in ports:
            made = socket.create_connection(port, SECONDS)
            made.sendall(SAID[number % len(SAID)])
            held.append(made)
        step()
    assert state.view.size == 3
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while state.view.size == 3:
        step()
    step()
    for each in held:
        each.close()
    digest = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    result = state.view.size, state.steps, digest
    state.close()
    return result


def test_a_job_trains_and_recovers_whoever_calls_its_ports(processes: Processes) -> None:
    first, second, _ = processes(3, besieged, nodes=["a", "b", "b"], agent=True, lost=[2])
    assert first == second
    assert first[0] == 2
