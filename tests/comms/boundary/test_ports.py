"""Every port of a process: of callers who say too much, nothing, or what they have heard others say."""

import json
import socket
import threading
import time
import urllib.request
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from gradwire.bench.doctor import network as doctor
from gradwire.comms.bootstrap import pending_connections, ring_connections
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failures import FAILED, GroupFailures, PeerFailure
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.bootstrap.probe import ANSWERS, EXITED, PeerAddress, PeerTable, ProbeServer, _digest, _secret
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.elastic import joining
from gradwire.comms.observe.metrics import Metrics

SECONDS = 30.0
"""For what must happen at last; how long it takes decides nothing."""


@pytest.fixture
def until() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pending_connections, "MOST_PENDING", 8)
    monkeypatch.setattr(pending_connections, "PENDING_SECONDS", 1e6)
    return 8


def wait_until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_closed(caller: socket.socket) -> bool:
    """Reads to the end of a connection; whether it comes."""
    caller.settimeout(SECONDS)
    try:
        while caller.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


class Between:
    """Passes on what goes over one connection to a port, and keeps what each end has said."""

    def __init__(self, until: ExitStack, port: int) -> None:
        self.heard: dict[str, bytes] = {"caller": b"", "called": b""}
        self._listener = until.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]
        self._target, self._until = port, until
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        one, _ = self._listener.accept()
        other = socket.create_connection(("127.0.0.1", self._target), SECONDS)
        for source, target, name in ((one, other, "caller"), (other, one, "called")):
            threading.Thread(target=self._copy, args=(source, target, name), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, name: str) -> None:
        with source, target:
            try:
                while said := source.recv(4096):
                    self.heard[name] += said
                    target.sendall(said)
            except OSError:
                return


def test_what_was_sent_to_a_probe_server_proves_nothing_a_second_time(until: ExitStack) -> None:
    server = ProbeServer.open()
    until.callback(server.close)
    server.register("start", 2)
    until.callback(lambda: server.unregister("start", 2))
    between = Between(until, server.port)
    PeerTable("start", 1, {2: PeerAddress(between.port, ("127.0.0.1",))}).notify([2], PeerFailure("it", FAILED))
    wait_until(lambda: server.reported_failure("start", 2))
    said = between.heard["caller"]
    assert b"start" not in said  # the name is no part of what goes over the wire
    server._reported.clear()
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as again:
        again.sendall(said)
        assert is_closed(again)
    assert server.reported_failure("start", 2) is None
    directory = PeerTable(
        "start", 1, {2: PeerAddress(server.port, ("127.0.0.1",)), 3: PeerAddress(server.port, ("127.0.0.1",))}
    )
    assert directory.probe([2, 3]) == {2: ANSWERS, 3: EXITED}


def test_a_process_without_the_secret_is_no_probe_server(until: ExitStack) -> None:
    """Another process that has got a probe server's port cannot say that the rank is here."""
    other = until.enter_context(socket.create_server(("127.0.0.1", 0)))

    def answer() -> None:
        caller, _ = other.accept()
        with caller:
            caller.sendall(b"gradwire probe 2" + bytes(16))
            caller.recv(4096)
            caller.sendall(b"+" + bytes(32))

    threading.Thread(target=answer, daemon=True).start()
    found = PeerTable("start", 1, {2: PeerAddress(other.getsockname()[1], ("127.0.0.1",))}).probe([2])
    assert found[2] != ANSWERS
    assert len(_digest(_secret("start", 2))) == 16


def two_rings(store: PollingStore) -> tuple[list[LivenessRing], list[list[Exception]]]:
    lost: list[list[Exception]] = [[], []]
    rings = [LivenessRing(store, rank, 2, GroupFailures(), lost[rank].append) for rank in (0, 1)]
    wait_until(lambda: all(sum(each.known for each in ring._connections.peers.values()) == 2 for ring in rings))
    return rings, lost


def test_a_rank_that_is_connected_cannot_be_claimed_again_nor_by_a_replay(until: ExitStack) -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    rings, lost = two_rings(store)
    for each in rings:
        until.callback(each.close)
    port, _, _, token = json.loads(store.get("alive/0"))
    hello = ring_connections.GREETING + (1).to_bytes(4, "big") + bytes(16)
    # Somebody who has read the secret in the store claims to be rank 1, which is connected.
    with socket.create_connection(("127.0.0.1", port), SECONDS) as claims:
        claims.sendall(hello)
        assert is_closed(claims)
    for rank in (0, 2, 1 << 31):  # itself, and ranks that there are not
        with socket.create_connection(("127.0.0.1", port), SECONDS) as claims:
            claims.sendall(ring_connections.GREETING + rank.to_bytes(4, "big") + bytes(16))
            assert is_closed(claims)
    assert len(bytes.fromhex(token)) == ring_connections.TOKEN_NBYTES
    assert not any(lost) and all(each.thread.is_alive() for each in rings)


def test_a_captured_introduction_to_a_ring_proves_nothing_in_another_connection() -> None:
    token = bytes(range(16))
    called, caller = ring_connections.RingConnections(0, 3), ring_connections.RingConnections(1, 3)
    try:
        told: list[bytes] = []
        called.token = token
        called.send = lambda connection, data: told.append(data)  # type: ignore[method-assign]
        caller.send = lambda connection, data: told.append(data)  # type: ignore[method-assign]
        hello = ring_connections.GREETING + (1).to_bytes(4, "big") + bytes(16)
        connection = called.listener
        theirs = ring_connections.PeerConnection(None, False, token, 0.0, received=hello)
        mine = ring_connections.PeerConnection(0, True, token, 0.0, hello=hello)
        assert called.handshake(connection, theirs) and not theirs.known
        mine.received = told.pop()
        assert caller.handshake(connection, mine) and mine.known
        theirs.received += (proof := told.pop())
        assert called.handshake(connection, theirs) and theirs.known and theirs.rank == 1
        again = ring_connections.PeerConnection(None, False, token, 0.0, received=hello + proof)
        assert not called.handshake(connection, again) and not again.known
        # The reply of one connection is none in another, and somebody without the secret has none.
        other = ring_connections.PeerConnection(
            0, True, token, 0.0, hello=hello[:-1] + b"x", received=theirs.reply + theirs.proof_of("called")
        )
        assert not caller.handshake(connection, other) and not other.known
        assert token not in hello + theirs.reply + proof
    finally:
        for each in (called, caller):
            each.close()


def metrics_of(text: str) -> Metrics:
    found = Metrics(None, 0, "127.0.0.1", 0.0)
    found._text = text
    return found


def test_a_crowd_at_the_metrics_port_costs_few_descriptors_and_no_thread(until: ExitStack, few: int) -> None:
    metrics = metrics_of("steps 3\n")
    until.callback(metrics.close)
    assert metrics.port
    before = threading.active_count()
    crowd = [
        until.enter_context(socket.create_connection(("127.0.0.1", metrics.port), SECONDS)) for _ in range(3 * few)
    ]
    for each in crowd[few:]:
        each.sendall(b"G")
    assert all(is_closed(each) for each in crowd[: 2 * few])
    assert threading.active_count() == before
    for path, status in (("/metrics", 200), ("/", 200)):
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=SECONDS) as answer:
            assert (answer.status, answer.read()) == (status, b"steps 3\n")


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.0 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.0 405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.0 200"),
        (b"\x16\x03\x01nonsense\r\n\r\n", b""),
        (b"GET /" + b"a" * 100_000, b""),
    ],
)
def test_the_metrics_port_answers_or_hangs_up(asked: bytes, answered: bytes, until: ExitStack) -> None:
    metrics = metrics_of("steps 3\n")
    until.callback(metrics.close)
    assert metrics.port
    with socket.create_connection(("127.0.0.1", metrics.port), SECONDS) as caller:
        try:
            caller.sendall(asked)
            found = b"".join(iter(lambda: caller.recv(4096), b""))
        except (ConnectionResetError, BrokenPipeError):
            found = b""
    assert found[:12] == answered
    assert b"steps" not in found


def test_a_scraper_that_says_nothing_is_hung_up_on(until: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_connections, "PENDING_SECONDS", 0.0)
    metrics = metrics_of("")
    until.callback(metrics.close)
    assert metrics.port
    with socket.create_connection(("127.0.0.1", metrics.port), SECONDS) as caller:
        assert is_closed(caller)


def test_a_counter_of_a_billion_requests_to_join_is_no_loop() -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    requests = joining.Requests(store.plain, timedelta(seconds=SECONDS), {}, {})
    store.add("join/count", 10**9)
    requests._poll_store()
    assert len(requests._open) == joining.MOST_OPEN
    requests._poll_store()
    assert len(requests._open) == joining.MOST_OPEN


@pytest.mark.parametrize(
    "made",
    [
        lambda: b64encode(zlib.compress(bytes(100 << 20))).decode(),
        lambda: "no base64 \xe9",
        lambda: "AAAA",
        lambda: "x" * (2 << 20),
    ],
    ids=["inflates", "no base64", "no archive", "long"],
)
def test_a_request_that_would_fill_the_memory_is_refused(made: Callable[[], str]) -> None:
    store = PollingStore(HashStore(), timedelta(seconds=SECONDS))
    requests = joining.Requests(store.plain, timedelta(seconds=SECONDS), {}, {})
    store.add("join/count", 1)
    word = {"name": "h/1/2", "shared": {}, "peer_info": made(), "model": {}}
    store.set("join/1/request", json.dumps(word))
    requests._poll_store()
    assert "refused" in json.loads(store.get("join/1/answer"))
    assert not requests._open


def test_the_doctors_listener_answers_no_packet_of_a_sender_it_does_not_know() -> None:
    with doctor.Listener() as one, doctor.Listener() as other:
        client = doctor.Client("127.0.0.1", one.ports)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind(("127.0.0.1", 0))
            for packet in (b"", b"x", b"?" + bytes(16), b"?" * 600, b"!" + client._seal, bytes(600)):
                sender.sendto(packet, ("127.0.0.1", one.ports[1]))
                sender.sendto(packet, ("127.0.0.1", other.ports[1]))
            sender.sendto(b"?" + client._seal, ("127.0.0.1", other.ports[1]))  # of another listener
            sender.sendto(b"?" + client._seal + b"last", ("127.0.0.1", one.ports[1]))
            sender.settimeout(SECONDS)
            assert sender.recv(1000) == b"!" + client._seal + b"last"  # and nothing came before
            # An answer is no question: two listeners never answer each other.
            sender.sendto(b"!" + client._seal + b"again", ("127.0.0.1", one.ports[1]))
            sender.sendto(b"?" + client._seal + b"end", ("127.0.0.1", one.ports[1]))
            assert sender.recv(1000).endswith(b"end")
        assert client.packets_pass(1400)
        client.close()


def test_a_crowd_at_the_doctors_port_gets_no_thread(until: ExitStack, few: int) -> None:
    listener = until.enter_context(doctor.Listener())
    before = threading.active_count()
    port = listener.ports[0]
    crowd = [until.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS)) for _ in range(3 * few)]
    assert all(is_closed(each) for each in crowd[: 2 * few])
    for said in (b"C" + b"\xff" * 16, b"D" + b"0" * 16, b"X" + b"0" * 16, b"C" + b"Z" * 16):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as caller:
            caller.sendall(said)
            assert is_closed(caller)
    assert threading.active_count() == before
    for line in (
        b"\xff\n",
        b"[" * 5000,
        b'{"do": "echo", "count": 1e999}\n',
        b'{"do": "flow", "sends": 10000}\n',
        b"{}\n",
    ):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as caller:
            caller.sendall(b"C" + b"0" * 16)
            assert len(caller.recv(16)) == 16
            caller.sendall(line)
            assert is_closed(caller)
        wait_until(lambda: not listener._flows)
    client = doctor.Client("127.0.0.1", listener.ports)
    assert client.latency_seconds() > 0
    client.close()
