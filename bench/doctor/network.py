"""Measurement of the network between two nodes: latency, TCP rates in one and both directions, full-size packets.

One process of each node serves measurements (`Listener`), and another node's requests them (`Client`). Plain sockets,
because a library's algorithm would be measured along with the link; threads, because socket calls release the GIL.
"""

import contextlib
import errno
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Literal, Self, TypeVar

from gradwire.bench.doctor.facts import PairRates
from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.kernel import TcpInfo, pace
from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.threads import BackgroundThread, in_thread, outcome_of
from gradwire.comms.boundary.messages import MessageError, MessageType, Within

STREAMS = 4
"""Connections of a flow over several connections. NCCL opens 1 to 4 to a peer on a NIC of 25 Gbit/s and less, and 8 on
clouds. Source: NCCL
user guide, NCCL_NSOCKS_PERTHREAD and NCCL_SOCKET_NTHREADS."""

CHUNK_NBYTES = 256 << 10
LEAD_SHARE = 0.4
"""Share of a flow's time at its start that does not count, because TCP still increases its rate."""

SMALL_BUFFER_NBYTES = 208 << 10
"""Send buffer for links whose product of rate and latency is far below it, so that a flow's queue drains soon after its
end. It is the kernel's default limit. Source: Linux net/core/sock.c, sysctl_wmem_max."""

PINGS = 60
CONNECT_SECONDS = 3.0
_NEVER_FRAGMENT = 10, 3
"""Socket option IP_MTU_DISCOVER and its value IP_PMTUDISC_PROBE: packets are never fragmented, and the kernel does not
apply the path MTU that it has learned. Source: ip(7)."""
_SMALL_PACKET_NBYTES = 500
_PACKET_TRIES = 4
_PACKET_SECONDS = 0.15
_IDLE_SECONDS = 0.5
_HEADERS_NBYTES = 28
"""Bytes of the headers of IPv4 and UDP."""
_DATA, _CONTROL = b"D", b"C"
"""First byte of a TCP connection: it carries a flow, or the requests of a session."""
_PROBE, _ECHO = b"?", b"!"
"""First byte of a UDP probe, and of its echo; the session's seal follows."""
_SEAL_NBYTES = 16
"""Length of a seal: random bytes that a listener draws for each session and sends over TCP. A UDP packet is answered
only if it has the seal of a session."""

SESSION_NBYTES = 16
"""Length of a session's name, in hexadecimal digits of one byte each."""

MOST_SESSIONS = 64
"""Upper limit of sessions at a time, each of which has a thread. A doctor measures to one node at a time."""

MOST_FLOWS = 64
"""Upper limit of a session's connections that wait for their flow."""

MOST_LINE_NBYTES = 4096
"""Upper limit of a line between two doctors, in bytes."""

PACED_SHARE = 0.4
"""Share of one connection's rate to which a flow is paced when packet loss is measured. Such a flow fills no queue, so
that its losses are those of the path itself."""
PACED_SEGMENTS = 400
"""Segments that a paced flow should send. It lasts longer if it needs to, up to `LONGEST_PACED_SECONDS`."""
LONGEST_PACED_SECONDS = 2.0
_SEGMENT_NBYTES = 1448
FLOW_ROUND_TRIPS = 30
"""Least length of a flow, in round trips. TCP doubles its window in each round trip at the start, and has its rate
after a dozen: `LEAD_SHARE` of these, which is not counted."""
LONGEST_FLOW_SECONDS = 3.0


@dataclass(slots=True)
class _Counted:
    """Arrivals of a flow's bytes on one or all of its connections: (moment, bytes)."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def rate(self, seconds: float) -> float:
        """Returns bytes per second after the first `LEAD_SHARE` of the flow's time; 0 if nothing arrived then.

        Args:
            seconds: Length of the flow, from its first byte.
        """
        if not self.arrivals:
            return 0.0
        moments = sorted(self.arrivals)
        begin = moments[0][0] + LEAD_SHARE * seconds
        end = moments[0][0] + seconds
        return sum(nbytes for moment, nbytes in moments if begin < moment <= end) / (end - begin)


@dataclass(frozen=True, slots=True)
class SentSegments:
    """The kernel's statistics of a sending connection (TCP_INFO).

    Attributes:
        sent: Segments with data.
        lost: Segments that were retransmitted because they were lost.
        window_share: Share of the time with data to send in which the receiver's window was full.
        buffer_share: Share of that time in which the send buffer was full.
    """

    sent: int = 0
    lost: int = 0
    window_share: float = 0.0
    buffer_share: float = 0.0


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Request:
    """Request of a `Client` to a `Listener`, as a line of JSON.

    Attributes:
        do: `clock` asks for the time, `echo` for single bytes to be returned, `flow` for a transfer.
        count: Number of bytes to return, for `echo`.
        sends: Connections on which the listener sends, for `flow`.
        receives: Connections on which the listener receives, for `flow`.
        seconds: Length of the flow.
        buffer: Send buffer of each connection in bytes; 0 for the default of the kernel.
        pace: Pacing rate of each connection in bytes per second; 0 for no limit.
    """

    do: Literal["clock", "echo", "flow"]
    count: Annotated[int, Within(0, 1000)] = 0
    sends: Annotated[int, Within(0, MOST_FLOWS)] = 0
    receives: Annotated[int, Within(0, MOST_FLOWS)] = 0
    seconds: Annotated[float, Within(0, 600)] = 0.0
    buffer: Annotated[int, Within(0, 1 << 30)] = 0
    pace: Annotated[float, Within(0, 1e15)] = 0.0


@dataclass(frozen=True, slots=True)
class _Clock:
    """The listener's response to a `_Request` that asks for the `clock`: its time of day, in seconds since 1970."""

    time: float


@dataclass(frozen=True, slots=True)
class _Ready:
    """The listener's first response to a `_Request` for a `flow`: all connections of it are here, and it may begin."""

    ready: bool


@dataclass(frozen=True, slots=True)
class _Flowed:
    """The listener's second response to a `_Request` for a `flow`, after the flow's end.

    Attributes:
        rate: Bytes per second that the listener received.
        sent: Kernel's statistics of the listener's first sending connection; None if it sent nothing, or the kernel has
            none.
    """

    rate: Annotated[float, Within(0, 1e18)]
    sent: SentSegments | None


_REQUEST: MessageType[_Request] = MessageType(_Request, most_nbytes=MOST_LINE_NBYTES)
_CLOCK: MessageType[_Clock] = MessageType(_Clock, most_nbytes=MOST_LINE_NBYTES)
_READY: MessageType[_Ready] = MessageType(_Ready, most_nbytes=MOST_LINE_NBYTES)
_FLOWED: MessageType[_Flowed] = MessageType(_Flowed, most_nbytes=MOST_LINE_NBYTES)


def sent_segments(connection: socket.socket) -> SentSegments | None:
    """Returns the kernel's statistics of a connection; None before Linux 5.4.

    Args:
        connection: TCP socket that has sent.
    """
    info = TcpInfo.of(connection)
    if not info.is_whole:
        return None
    busy = max(info.busy_seconds, 1e-6)
    lost = max(info.retransmitted - info.sent_twice, 0)
    return SentSegments(info.segments, lost, info.receiver_seconds / busy, info.sender_seconds / busy)


def flow(
    sends: Sequence[socket.socket], receives: Sequence[socket.socket], seconds: float
) -> tuple[float, SentSegments | None]:
    """Sends on some connections and receives on others for some seconds, then closes them all.

    Args:
        sends: Connections to send on.
        receives: Connections to receive on.
        seconds: Length of the flow.

    Returns:
        Bytes received per second, 0 without `receives`; and the kernel's statistics of the sending connection that
        ended first, None without `sends` or if the kernel has none.
    """
    began = threading.Event()
    counted = [_Counted() for _ in receives]
    stats: list[SentSegments | None] = []
    ends = [in_thread(partial(_send, each, seconds, began, stats), "doctor sends", awaited=False) for each in sends]
    ends += [
        in_thread(partial(_receive, each, seconds, count), "doctor receives", awaited=False)
        for each, count in zip(receives, counted, strict=True)
    ]
    began.set()
    for ended in [end.get() for end in ends]:
        outcome_of(ended)
    return _Counted([each for count in counted for each in count.arrivals]).rate(seconds), stats[0] if stats else None


def _send(connection: socket.socket, seconds: float, began: threading.Event, stats: list[SentSegments | None]) -> None:
    """Sends zeros for some seconds from the event on, appends the connection's statistics to `stats`, and closes it."""
    chunk = memoryview(bytes(CHUNK_NBYTES))
    began.wait()
    end = time.perf_counter() + seconds
    connection.settimeout(0.1)
    with connection:
        with contextlib.suppress(ConnectionError):  # the receiver ends first
            while time.perf_counter() < end:
                with contextlib.suppress(TimeoutError):
                    connection.send(chunk)
        stats.append(sent_segments(connection))
        # What is still queued here need not arrive: it would stand in the way of the next flow.
        with contextlib.suppress(OSError):  # it is gone already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _receive(connection: socket.socket, seconds: float, counted: _Counted) -> None:
    """Receives until `seconds` after the first byte, adds the arrivals to `counted`, and closes the connection."""
    buffer = bytearray(CHUNK_NBYTES)
    connection.settimeout(0.1)
    deadline = time.perf_counter() + seconds + 1.0
    end = deadline
    with contextlib.suppress(ConnectionError), connection:
        while (now := time.perf_counter()) < end:
            try:
                nbytes = connection.recv_into(buffer)
            except TimeoutError:
                continue
            if nbytes == 0:
                return
            now = time.perf_counter()
            if not counted.arrivals:
                end = min(deadline, now + seconds)
            counted.arrivals.append((now, nbytes))


class Listener:
    """Server of this node for the measurements of other nodes; it runs in its own threads until it is closed.

    Thread safety: `close` may be called while the threads serve.
    """

    def __init__(self) -> None:
        self._tcp = listener(64)
        self._udp = socket.socket(self._tcp.family, socket.SOCK_DGRAM)
        if self._tcp.family == socket.AF_INET6:
            self._udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._udp.bind(("", 0))
        self._flows: dict[str, queue.Queue[socket.socket]] = {}
        self._sessions: dict[str, bytes] = {}
        self._lock = threading.Lock()  # Guards _flows and _sessions.
        self._closed = False
        for what, work, served in (
            ("measurements", self._accept, self._tcp),
            ("packets", self._echo_packets, self._udp),
        ):
            BackgroundThread(
                f"doctor's {what}",
                work,
                without=f"other nodes get no answer to their {what}",
                on_failure=lambda error, served=served: served.close(),  # type: ignore[misc]
                awaited=False,
            ).start()

    @property
    def ports(self) -> tuple[int, int]:
        """Port numbers of the TCP and the UDP socket."""
        return self._tcp.getsockname()[1], self._udp.getsockname()[1]

    def _accept(self) -> None:
        """Accepts connections that name a session; at most `MOST_SESSIONS` are served at a time, each by a thread."""
        with (
            contextlib.closing(self._tcp),  # here: a socket that is closed while it is waited on wakes no thread
            contextlib.closing(PendingConnections(self._tcp, lambda got: 1 + SESSION_NBYTES - len(got))) as pending,
        ):
            while not self._closed:
                try:
                    callers = pending.next(CONNECT_SECONDS)
                except (OSError, ValueError):  # closed
                    return
                for connection, first in callers:
                    connection.settimeout(10 * CONNECT_SECONDS)
                    if not self._admit(connection, first[:1], first[1:]):
                        connection.close()

    def _admit(self, connection: socket.socket, kind: bytes, name: bytes) -> bool:
        """Hands a new connection to its session, or begins a session with it.

        Args:
            connection: Connection of the caller.
            kind: First byte that it sent, `_DATA` or `_CONTROL`.
            name: Name of its session, as it sent it.

        Returns:
            False if the connection was not taken: its first bytes are not a doctor's, its session is not known, or
            there are too many.
        """
        session = name.decode("ascii", errors="replace")
        if len(session) != SESSION_NBYTES or not set(session) <= set("0123456789abcdef"):
            return False
        with self._lock:
            if kind == _DATA:  # of a session that has begun, and asked for a flow
                waiting = self._flows.get(session)
                if waiting is None or waiting.qsize() >= MOST_FLOWS:
                    return False
                waiting.put(connection)
                return True
            if kind != _CONTROL or session in self._flows or len(self._flows) >= MOST_SESSIONS:
                return False
            self._flows[session] = queue.Queue()
            self._sessions[session] = secrets.token_bytes(_SEAL_NBYTES)
        BackgroundThread(
            "doctor's measurement",
            partial(self._serve, connection, session),
            without="one measurement of another node fails",
            on_failure=lambda error: connection.close(),
            awaited=False,
        ).start()
        return True

    def _serve(self, connection: socket.socket, session: str) -> None:
        """Handles the requests of a session until its connection ends, then forgets the session."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = connection.makefile("rb", buffering=0)
        # This thread ends when the client ends or stops sending; the client reports what it missed.
        try:
            with contextlib.suppress(OSError, queue.Empty, MessageError), connection, lines:
                connection.sendall(self._sessions[session])
                while line := lines.readline(MOST_LINE_NBYTES):
                    self._respond(connection, session, _REQUEST.read(line))
        finally:
            with self._lock:
                waiting = self._flows.pop(session)
                del self._sessions[session]
            while not waiting.empty():
                waiting.get().close()

    def _respond(self, connection: socket.socket, session: str, request: "_Request") -> None:
        """Handles one request, and sends the response.

        Raises:
            MessageError: A flow's connection does not say whether it sends or receives.
            queue.Empty: A flow's connections did not arrive in time.
            OSError: The connection ended.
        """
        if request.do == "clock":
            _send_line(connection, {"time": time.time()})
        elif request.do == "echo":
            for _ in range(request.count):
                connection.sendall(_exactly(connection, 1))
        else:
            waiting = self._flows[session]
            connections = [waiting.get(timeout=10 * CONNECT_SECONDS) for _ in range(request.sends + request.receives)]
            roles: dict[bytes, list[socket.socket]] = {b"s": [], b"r": []}
            for each in connections:
                role = _exactly(each, 1)
                if role not in roles:
                    raise MessageError(f"a connection is to {role!r}; wanted to send or to receive")
                roles[role].append(each)
                _limit(each, request.buffer, request.pace)
            _send_line(connection, {"ready": True})
            rate, sent = flow(roles[b"s"], roles[b"r"], request.seconds)
            _send_line(connection, {"rate": rate, "sent": None if sent is None else asdict(sent)})

    def _echo_packets(self) -> None:
        """Sends UDP probes that have the seal of an open session back to their senders, until the socket is closed."""
        self._udp.setsockopt(socket.IPPROTO_IP, *_NEVER_FRAGMENT)
        while True:
            try:
                packet, sender = self._udp.recvfrom(1 << 16)
            except OSError:  # closed
                return
            if sender is None:  # shut down, which wakes this thread before the socket is closed
                return
            # Only probes of a session's client are echoed, and an echo is no probe: two listeners never echo to each
            # other, whatever sender a packet claims.
            with self._lock:
                seals = list(self._sessions.values())
            if not any(packet.startswith(_PROBE + seal) for seal in seals):
                continue
            packet = _ECHO + packet[1:]
            with contextlib.suppress(OSError):  # larger than this end's MTU: the client gets no echo
                self._udp.sendto(packet, sender)

    def close(self) -> None:
        """Shuts the sockets down, which wakes and ends the threads that wait on them; does not wait for the threads.

        Sessions under way go on until their clients end. The thread that accepts connections closes its socket itself.
        """
        self._closed = True
        for each in (self._tcp, self._udp):
            with contextlib.suppress(OSError):  # UDP has nobody to say it to
                each.shutdown(socket.SHUT_RDWR)
        self._udp.close()

    def __enter__(self) -> Self:
        """Returns the listener itself, for `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Closes the listener."""
        self.close()


class Client:
    """Session of measurements from this node to one other node's `Listener`.

    Args:
        address: IPv4 or IPv6 address of the other node.
        ports: TCP and UDP port of its listener.
        source: Address of this node from which to connect; None lets the kernel choose it by the routes.

    Raises:
        OSError: The listener cannot be reached.
    """

    def __init__(self, address: str, ports: tuple[int, int], source: str | None = None) -> None:
        self._source = None if source is None else (source, 0)
        self._address = address
        self._ports = ports
        self._session = secrets.token_hex(8)
        self._control = self._connect(_CONTROL)
        self._control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._seal = _exactly(self._control, _SEAL_NBYTES)
        except OSError:
            self._control.close()
            raise
        self._lines = self._control.makefile("rb", buffering=0)

    def _connect(self, kind: bytes, extra: bytes = b"") -> socket.socket:
        """Opens a TCP connection to the listener, and sends its kind, the session's name and `extra` on it."""
        connection = socket.create_connection((self._address, self._ports[0]), CONNECT_SECONDS, self._source)
        connection.sendall(kind + self._session.encode() + extra)
        connection.settimeout(10 * CONNECT_SECONDS)
        return connection

    def latency_seconds(self) -> float:
        """Returns the seconds of one way to the other node: half of the shortest of `PINGS` round trips."""
        _send_line(self._control, {"do": "echo", "count": PINGS})
        return min(self._ping() for _ in range(PINGS)) / 2

    def _ping(self) -> float:
        """Returns the seconds of one round trip; an `echo` request must have announced it."""
        began = time.perf_counter()
        self._control.sendall(b".")
        _exactly(self._control, 1)
        return time.perf_counter() - began

    def wait_until_idle(self, latency_seconds: float) -> None:
        """Waits until the queues filled by a flow are empty, which a short round trip shows, or for half a second.

        Args:
            latency_seconds: Seconds of one way on the idle link, as `latency_seconds` returned it.
        """
        deadline = time.perf_counter() + _IDLE_SECONDS
        took = float("inf")
        while took > max(8 * latency_seconds, 1e-3) and time.perf_counter() < deadline:
            _send_line(self._control, {"do": "echo", "count": 1})
            took = self._ping()

    def clock_seconds(self) -> float:
        """Returns the seconds by which the other node's clock is ahead of this one's, negative if it is behind.

        The quickest of five requests counts.
        """
        found = []
        for _ in range(5):
            began = time.time()
            _send_line(self._control, {"do": "clock"})
            theirs = self._response(_CLOCK).time
            ended = time.time()
            found.append((ended - began, theirs - (began + ended) / 2))
        return min(found)[1]

    def rates(self, there: int, back: int, seconds: float, buffer_nbytes: int = 0) -> tuple[float, float]:
        """Runs a flow in both directions at once; returns the received rates (there, back), in bytes per second.

        Args:
            there: Connections that send to the other node.
            back: Connections that receive from it.
            seconds: Length of the flow.
            buffer_nbytes: Send buffer of each socket; 0 for the default of the kernel.
        """
        return self.flows(there, back, seconds, buffer_nbytes)[0]

    def flows(
        self, there: int, back: int, seconds: float, buffer_nbytes: int = 0, bytes_per_second: float = 0.0
    ) -> tuple[tuple[float, float], tuple[SentSegments | None, SentSegments | None]]:
        """Runs a flow in both directions at once; returns the rates received, and the senders' kernel statistics.

        Args:
            there: Connections that send to the other node.
            back: Connections that receive from it.
            seconds: Length of the flow.
            buffer_nbytes: Send buffer of each socket; 0 for the default of the kernel.
            bytes_per_second: Pacing rate of each sender; 0 for no limit.

        Returns:
            The received rates (there, back) in bytes per second, and the statistics of a sender in each direction, None
            if the direction has no connection or its kernel no statistics.

        Raises:
            OSError: The other node ended the measurement, or does not answer as a doctor.
        """
        sends = [self._connect(_DATA, b"r") for _ in range(there)]
        receives = [self._connect(_DATA, b"s") for _ in range(back)]
        for each in (*sends, *receives):
            _limit(each, buffer_nbytes, bytes_per_second)
        _send_line(
            self._control,
            {
                "do": "flow",
                "sends": back,
                "receives": there,
                "seconds": seconds,
                "buffer": buffer_nbytes,
                "pace": bytes_per_second,
            },
        )
        self._response(_READY)
        received, sent = flow(sends, receives, seconds)
        response = self._response(_FLOWED)
        return (response.rate, received), (sent, response.sent)

    def packets_pass(self, packet_nbytes: int) -> bool | None:
        """Returns whether unfragmented UDP packets of this size come back; None if small ones do not either.

        None points to a firewall that drops UDP, and says nothing about the size.

        Args:
            packet_nbytes: Size of a packet with the headers of IP and UDP, in bytes.
        """
        with socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.SOCK_DGRAM) as probing:
            probing.setsockopt(socket.IPPROTO_IP, *_NEVER_FRAGMENT)
            probing.settimeout(_PACKET_SECONDS)
            if not self._comes_back(probing, _SMALL_PACKET_NBYTES):
                return None
            return self._comes_back(probing, packet_nbytes - _HEADERS_NBYTES)

    def _comes_back(self, probing: socket.socket, nbytes: int) -> bool:
        """Sends a packet with `nbytes` of payload up to `_PACKET_TRIES` times; returns whether an echo came."""
        for number in range(_PACKET_TRIES):
            packet = (_PROBE + self._seal + bytes([number])).ljust(nbytes, b"\0")
            try:
                probing.sendto(packet, (self._address, self._ports[1]))
                if probing.recv(1 << 16) == _ECHO + packet[1:]:
                    return True
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                return False
        return False

    def _response(self, wanted: MessageType[T]) -> T:
        """Reads a response of the listener.

        Raises:
            ConnectionError: The listener has closed the connection, or its line is not of this type.
        """
        line = self._lines.readline(MOST_LINE_NBYTES)
        if not line:
            raise ConnectionError(f"{self._address} ended the measurement")
        try:
            return wanted.read(line)
        except MessageError as error:
            raise ConnectionError(f"{self._address} does not answer as a doctor: {error}") from None

    def close(self) -> None:
        """Closes the connection to the listener, which ends the session of measurements."""
        self._lines.close()
        self._control.close()


def measure_pair(client: Client, places: tuple[int, int], seconds: float, packet_nbytes: int) -> PairRates:
    """Measures the path between two nodes: latency, rates, lost segments, clocks, and packets of full size.

    Args:
        client: Session from the first node to the second.
        places: Numbers of the two nodes.
        seconds: Least length of each of the six flows; a long round trip makes them longer.
        packet_nbytes: Size of the packets that must pass unfragmented, in bytes with all headers.
    """
    # Measure what needs an idle path.
    latency = client.latency_seconds()
    packets = client.packets_pass(packet_nbytes)
    # Measure one connection in each direction, then several in each direction and in both at once.
    seconds = max(seconds, min(2 * FLOW_ROUND_TRIPS * latency, LONGEST_FLOW_SECONDS))
    (there, _), (sent_there, _) = client.flows(1, 0, seconds)
    client.wait_until_idle(latency)
    (_, back), (_, sent_back) = client.flows(0, 1, seconds)
    one = there, back
    client.wait_until_idle(latency)
    # Where this much covers the path many times over, little is queued, and acknowledgements do not wait behind it.
    buffer = SMALL_BUFFER_NBYTES if 8 * max(one) * latency < SMALL_BUFFER_NBYTES else 0
    many = (
        client.rates(STREAMS, 0, seconds, buffer)[0],
        client.rates(0, STREAMS, seconds, buffer)[1],
    )
    both = client.rates(STREAMS, STREAMS, seconds, buffer)
    client.wait_until_idle(latency)
    # Count lost segments of flows that are slow enough not to cause losses themselves.
    sent, lost = _lost(client, PACED_SHARE * min(one), seconds)
    own = [each for each in (sent_there, sent_back) if each is not None]
    return PairRates(
        a=places[0],
        b=places[1],
        latency_seconds=latency,
        one=one,
        many=(max(many[0], one[0]), max(many[1], one[1])),
        both=both,
        sent=sent,
        lost=lost,
        window_share=max((each.window_share for each in own), default=None),
        buffer_share=max((each.buffer_share for each in own), default=None),
        clock_seconds=client.clock_seconds(),
        packet_nbytes=packet_nbytes if packets is not None else None,
        packets_pass=packets,
    )


def _lost(client: Client, bytes_per_second: float, seconds: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Counts the segments that paced flows send and lose in each direction, at a rate that should lose none.

    Args:
        client: Session to the other node.
        bytes_per_second: Pacing rate of the flow in each direction; at 0 nothing is measured.
        seconds: Least length of the flows.

    Returns:
        Segments sent (there, back), and segments lost (there, back); zeros if the kernels have no statistics.
    """
    if bytes_per_second <= 0:
        return (0, 0), (0, 0)
    wanted = PACED_SEGMENTS * _SEGMENT_NBYTES / bytes_per_second
    lasts = min(max(seconds, wanted), LONGEST_PACED_SECONDS)
    _, found = client.flows(1, 1, lasts, bytes_per_second=bytes_per_second)
    there, back = (each or SentSegments() for each in found)
    return (there.sent, back.sent), (there.lost, back.lost)


def _limit(connection: socket.socket, buffer_nbytes: int, bytes_per_second: float) -> None:
    """Sets a connection's send buffer and pacing rate.

    Args:
        connection: TCP socket.
        buffer_nbytes: Size of the send buffer; 0 leaves the default of the kernel.
        bytes_per_second: Pacing rate; 0 sets no limit.
    """
    if buffer_nbytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    if bytes_per_second:
        pace(connection, bytes_per_second)


def _send_line(connection: socket.socket, what: dict[str, object]) -> None:
    """Sends an object as a line of JSON."""
    connection.sendall(json.dumps(what).encode() + b"\n")


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Receives exactly `nbytes` bytes.

    Raises:
        ConnectionError: The connection ended before.
    """
    found = b""
    while len(found) < nbytes:
        piece = connection.recv(nbytes - len(found))
        if not piece:
            raise ConnectionError("the other node ended the measurement")
        found += piece
    return found
