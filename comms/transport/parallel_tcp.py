"""Messages between two ranks over as many TCP connections as a long path needs.

One connection carries a window of data in each round trip. After a lost packet the window shrinks, and after a pause it
starts at ten segments again, so over 80 ms and 0.1 % loss one connection gets 8 of 100 Mbit/s. Of many connections one
at a time loses. A message is cut into chunks, and each goes to whichever connection takes more: a slow one holds up a
chunk, not its share of the message. The more is left, the larger is a chunk, and what the kernel may hold of it: on a
busy machine the thread here comes late to a connection that has run empty. Chunks are written to where they belong, so
no bit depends on how they travelled.

Gloo's own messages wait for a word from the receiver, which travels behind its data; here the receiver's memory is
announced by nothing: what comes before its time waits in the kernel.

Source: Mathis et al. (1997) for the window at a given loss; RFC 2861 and RFC 6928 for the window after a pause;
Polychronopoulos and Kuck, "Guided self-scheduling", IEEE Transactions on Computers 36 (1987), for the size of chunks;
tcp(7), TCP_INFO and TCP_NOTSENT_LOWAT; what was measured: docs/results/distance.md.
"""

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import torch
from torch import Tensor

from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES, new_nonce, proof_of
from gradwire.comms.errors import PeerError
from gradwire.comms.transport.pacing import Pacing
from gradwire.compressors.base import Work

LEAST_CHUNK_NBYTES, MOST_CHUNK_NBYTES = 2 << 10, 256 << 10
"""A chunk is the power of two below half a connection's even share of what is left, within these. With 16 KiB
throughout, four connections got 0.18 of a link of 100 Mbit/s and 20 ms where gloo got 0.42: at a load of 22 on two
cores the thread here was waiting for a processor for 0.8 of 1 s. With up to 256 KiB they got 0.34, in turns with
those (4 MB, 2026-11-23); larger chunks in larger buffers gave no more. Of a small message all connections have a part:
16 KiB are more than a first window, and took one of them two round trips."""

LEAST_UNSENT_NBYTES = 16 << 10
"""A connection takes a chunk while less than that, or than a chunk, waits unsent in its kernel's buffer: with more slow
ones would hoard them, with less they run empty where the thread here waits for a processor."""

LEAST_RATE = 12.5e6
"""Bytes per second, where a link's rate was measured: a look of some tens of kilobytes over a long path sees the
windows of TCP and not the link."""

UNSEEN_RATE = 25e6
"""Bytes per second, where nobody has said or measured a link's rate. With 125e6, 64 connections to each of two other
nodes over 20 ms got 0.3 to 0.5 of links of 100 Mbit/s (sums of 4 MB), 17 got 0.9 and gloo 0.7: the pace of one of many
is so low that the last chunks take long. Of 400 Mbit/s 35 connections between two nodes got what 64 did, 0.80 and 0.81
(2026-11-24)."""

HEADER = struct.Struct("!QQQ")
"""Number of the message, offset and bytes of the chunk."""
_HELLO = struct.Struct(f"!I{PROOF_NBYTES}s")
"""Rank of who connects, and its proof that it knows the token of who listens, which greets it with a nonce."""
_TCP_NOTSENT_LOWAT = 25
"""Number of the socket option. Source: Linux include/uapi/linux/tcp.h."""

Alarm = Callable[[], str | None]
"""As in `gradwire.comms.transport.torch_group`."""


def chunk_nbytes(left_nbytes: int, connections: int) -> int:
    """Bytes of the next chunk: see `LEAST_CHUNK_NBYTES`.

    Args:
        left_nbytes: That no connection has been given yet.
        connections: That share them.
    """
    nbytes = LEAST_CHUNK_NBYTES
    while nbytes < MOST_CHUNK_NBYTES and 4 * nbytes * connections <= left_nbytes:
        nbytes *= 2
    return nbytes


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as they lie; holds the tensor's memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class StreamListener:
    """Where other ranks connect to this one.

    Args:
        family: AF_INET or AF_INET6.
        address: Of this rank, on the interface that gloo uses.
        backlog: Connections that may wait.
    """

    def __init__(self, family: int, address: str, backlog: int) -> None:
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(backlog)
        self.port: int = self._socket.getsockname()[1]
        self.token = int.from_bytes(os.urandom(8))
        """What a connection proves that it knows; another program's is closed."""

    def accept(self, wanted: Mapping[int, int], deadline: float, alarm: Alarm | None) -> dict[int, list[socket.socket]]:
        """Waits for connections.

        Args:
            wanted: Rank -> connections.
            deadline: Monotonic seconds.
            alarm: Asked about once a second.

        Raises:
            PeerError: Another rank has given up.
            RuntimeError: They did not come in time.
        """
        found: dict[int, list[socket.socket]] = {rank: [] for rank in wanted}
        with (
            ExitStack() as unless_all_come,
            closing(PendingConnections(self._socket, lambda heard: _HELLO.size - len(heard), new_nonce)) as pending,
        ):
            while any(len(found[rank]) < count for rank, count in wanted.items()):
                _check_on(deadline, alarm)
                for connection, said in pending.next(1.0):
                    nonce, hello = said[:NONCE_NBYTES], said[NONCE_NBYTES:]
                    rank, proof = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))  # zeros are no proof
                    if proof == _proof(self.token, nonce, rank) and len(found.get(rank, ())) < wanted.get(rank, 0):
                        found[rank].append(unless_all_come.enter_context(connection))
                    else:
                        connection.close()
            unless_all_come.pop_all()
        return found

    def close(self) -> None:
        """Takes no further connections."""
        self._socket.close()


def connect(
    family: int, address: str, port: int, token: int, rank: int, count: int, deadline: float, alarm: Alarm | None
) -> list[socket.socket]:
    """Opens connections to a rank that listens; all of them are under way together.

    Args:
        family: AF_INET or AF_INET6.
        address: Of the other rank.
        port: Of its `StreamListener`.
        token: Of its `StreamListener`.
        rank: This one.
        count: Connections.
        deadline: Monotonic seconds.
        alarm: As for `StreamListener.accept`.

    Raises:
        PeerError: Another rank has given up.
        RuntimeError: The other rank was not reached in time.
        OSError: It refuses.
    """
    made = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in made:
            each.setblocking(False)
            if (error := each.connect_ex((address, port))) not in (0, errno.EINPROGRESS):
                raise _unreached(address, error)
        for each in made:
            waiting = select.poll()
            waiting.register(each, select.POLLOUT)
            while not waiting.poll(1000):
                _check_on(deadline, alarm)
            if error := each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise _unreached(address, error)
            nonce = _greeting(each, deadline, alarm)
            each.sendall(_HELLO.pack(rank, _proof(token, nonce, rank)))  # 36 bytes into an empty buffer
    except BaseException:
        for each in made:
            each.close()
        raise
    return made


def _greeting(connection: socket.socket, deadline: float, alarm: Alarm | None) -> bytes:
    """The nonce that who listens says at first.

    Raises:
        OSError: Another program listens there, or has hung up.
    """
    heard = b""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    while len(heard) < NONCE_NBYTES:
        while not waiting.poll(1000):
            _check_on(deadline, alarm)
        if not (more := connection.recv(NONCE_NBYTES - len(heard))):
            raise OSError(errno.ECONNRESET, "who listens at the port of a rank has hung up")
        heard += more
    return heard


def _proof(token: int, nonce: bytes, rank: int) -> bytes:
    return proof_of(token.to_bytes(8, "big"), "stream", nonce, rank.to_bytes(4, "big"))


def _unreached(address: str, error: int) -> OSError:
    return OSError(error, f"cannot connect to rank at {address}: {os.strerror(error)}")


def _check_on(deadline: float, alarm: Alarm | None) -> None:
    if alarm is not None and (reason := alarm()):
        raise PeerError(reason)
    if time.monotonic() > deadline:
        raise RuntimeError(
            "a rank did not open its connections within `timeout`: it has ended, or a firewall is between"
        )


class StreamedMessage:
    """What goes to one rank and comes from it in one exchange; the order of exchanges is the same on both."""

    def __init__(
        self, peer: int, number: int, sent: memoryview, received: memoryview, exchange: "StreamedExchange"
    ) -> None:
        self.peer = peer
        self.number = number
        self.to_come = len(received)
        """Bytes of `received` whose chunk has not begun to come."""
        self.sent = sent
        self.received = received
        self.exchange = exchange
        self.handed_out = 0
        """Bytes of `sent` that are with some connection."""

    @property
    def left(self) -> int:
        """Bytes that no connection has been given."""
        return len(self.sent) - self.handed_out

    def next_chunk(self, nbytes: int) -> tuple[int, int]:
        """Hands out (start, stop) of at most so many bytes."""
        start, self.handed_out = self.handed_out, min(self.handed_out + nbytes, len(self.sent))
        return start, self.handed_out


class StreamedExchange:
    """Is done when all its bytes have been taken by the kernel, and all others have arrived.

    Args:
        nbytes: Of all its messages.
        then: Called in the thread that moves the bytes, when the last of them has.
    """

    def __init__(self, nbytes: int, then: Callable[[], None] | None = None) -> None:
        self.left = nbytes
        self.done = threading.Event()
        self._then = then
        if nbytes == 0:
            self.done.set()

    def book(self, nbytes: int) -> None:
        """Counts bytes that have been sent or have come; the last of them end it."""
        self.left -= nbytes
        if self.left == 0:
            if self._then is not None:
                self._then()
                self._then = None  # with what it holds
            self.done.set()


class StreamConnection:
    """One connection: what is left of the chunk that it sends, and of the one that it receives."""

    def __init__(self, opened: socket.socket, peer: int) -> None:
        self.socket = opened
        self.peer = peer
        self.outgoing: list[memoryview] = []
        self.sending: StreamedExchange | None = None
        self.payload_left = 0
        self.header = bytearray(HEADER.size)
        self.have = 0
        self.target: memoryview | None = None
        self.receiving: StreamedExchange | None = None
        self.is_open = True
        self.unsent_nbytes = 0
        """Unsent bytes below which the kernel asks for more: its TCP_NOTSENT_LOWAT, as it was last told."""
        self.parked = False
        """Its next chunk is of a message that this rank has not asked for yet."""


class StreamedPeer:
    """The messages to and from one rank."""

    def __init__(self) -> None:
        self.numbered = 0
        self.taken_up = 0
        """The number of the next message that the thread has not heard of."""
        self.outgoing: deque[StreamedMessage] = deque()
        self.incoming: dict[int, StreamedMessage] = {}

    @property
    def is_waited_for(self) -> bool:
        """Whether something is left to be sent to it, or to come from it."""
        return bool(self.outgoing or self.incoming)


class Streams:
    """Exchanges with other ranks over many connections; a thread moves the bytes.

    Args:
        connections: Rank -> connected sockets, as many at its end.
        timeout: For an exchange.
        alarm: Asked about once a second while an exchange is waited for.
    """

    def __init__(
        self, connections: Mapping[int, Sequence[socket.socket]], timeout: timedelta, alarm: Alarm | None
    ) -> None:
        self._timeout = timeout
        self.alarm = alarm
        self._peers = {rank: StreamedPeer() for rank in connections}
        self._connections = [StreamConnection(each, rank) for rank, sockets in connections.items() for each in sockets]
        for connection in self._connections:
            connection.socket.setblocking(False)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            allow_unsent(connection, LEAST_UNSENT_NBYTES)
        self._submitted: deque[StreamedMessage] = deque()
        self._under_way: list[StreamedExchange] = []
        self._lock = threading.Lock()
        self._bell = socket.socketpair()
        """Rung at one end, by any thread, for the thread at the other one."""
        self._bell[1].setblocking(False)
        self._closed = False
        self.error: str | None = None
        """Why no exchange gets through any more; None while they do."""
        self._poll = select.poll()
        self.by_descriptor = {connection.socket.fileno(): connection for connection in self._connections}
        """All connections, for who ends them from outside."""
        self._pacing = Pacing()
        BackgroundThread(
            "gradwire streams",
            self._run,
            without="its connections to other ranks are closed, and what was under way over them fails",
            on_failure=lambda error: self._fail(
                f"the thread of the connections to other ranks has failed: {type(error).__name__}: {error}"
            ),
            end=self.close,
        ).start()

    @property
    def count(self) -> int:
        """Connections to each rank."""
        return len(self._connections) // max(1, len(self._peers))

    def exchange(self, pieces: Sequence[tuple[int, Tensor, Tensor]]) -> Work:
        """Sends tensors to other ranks and receives from them, all at once.

        Args:
            pieces: (rank, what it is sent, what takes its), contiguous CPU tensors of any dtype and length; the other
                rank calls with the same lengths the other way round, in the same order of calls.

        Returns:
            A work; both tensors of each piece are left alone until it is done.

        Raises:
            RuntimeError: A connection has been lost before.
        """
        views = views_of(pieces)
        exchange = StreamedExchange(nbytes_of(views))
        with self._lock:
            self._submit(self._numbered(views, exchange), exchange)
        self._nudge()
        return self._pending(exchange)

    def exchange_twice(
        self,
        first: Sequence[tuple[int, Tensor, Tensor]],
        between: Callable[[], None],
        second: Sequence[tuple[int, Tensor, Tensor]],
    ) -> Work:
        """Exchanges, does something with what has come, and exchanges again, all by itself.

        What the second exchange receives may lie where the first one sends from, if no rank sends it before it has had
        that. All of `first` together is not empty.

        Args:
            first: As for `exchange`.
            between: Called once all of `first` has been sent and received, in the thread that moves the bytes.
            second: As for `exchange`; what it sends is read after `between`.

        Returns:
            A work; all tensors are left alone until it is done.

        Raises:
            RuntimeError: A connection has been lost before.
        """
        early, late = views_of(first), views_of(second)
        after = StreamedExchange(nbytes_of(late))

        def go_on() -> None:
            try:
                between()
            except Exception as error:
                raise Ended(f"what has come cannot be worked on: {error}") from error
            for each in answers:
                self._peers[each.peer].outgoing.append(each)
                self._check_reaches(each.peer)
            pace(self._pacing, self._connections, self._peers)
            for connection in self._connections:
                if connection.is_open:
                    self._watch(connection)

        before = StreamedExchange(nbytes_of(early), go_on)
        with self._lock:
            messages = self._numbered(early, before)
            numbered = self._numbered(late, after)
            empty = memoryview(b"")
            answers = [
                StreamedMessage(each.peer, each.number, each.sent, empty, after) for each in numbered if each.sent
            ]
            awaited = [StreamedMessage(each.peer, each.number, empty, each.received, after) for each in numbered]
            self._submit([*messages, *awaited], before, after)
        self._nudge()
        return self._pending(before, after)

    def _numbered(
        self, views: Sequence[tuple[int, memoryview, memoryview]], exchange: StreamedExchange
    ) -> list[StreamedMessage]:
        messages = []
        for rank, sent, received in views:
            peer = self._peers[rank]
            messages.append(StreamedMessage(rank, peer.numbered, sent, received, exchange))
            peer.numbered += 1
        return messages

    def _submit(self, messages: Sequence[StreamedMessage], *exchanges: StreamedExchange) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)
        self._submitted.extend(messages)
        self._under_way = [each for each in self._under_way if not each.done.is_set()] + list(exchanges)

    def _pending(self, *exchanges: StreamedExchange) -> "_Pending":
        return _Pending(self, exchanges, time.monotonic() + self._timeout.total_seconds())

    def close(self) -> None:
        """Ends the thread and the connections; any thread, more than once."""
        self._closed = True
        self._nudge()

    def _nudge(self) -> None:
        with suppress(OSError):  # the thread has ended and closed it
            self._bell[0].send(b"w")

    def _run(self) -> None:
        torch.set_flush_denormal(False)  # sums between two exchanges are made on every rank: as in lanes
        try:
            self._move()
            self._fail("the connections to other ranks were closed")
        except OSError as error:
            self._fail(f"a connection to another rank was lost: {error.strerror or error}")
        except Ended as error:
            self._fail(f"{error}")
        finally:
            for connection in self._connections:
                connection.socket.close()
            self._bell[0].close()
            self._bell[1].close()

    def _fail(self, why: str) -> None:
        with self._lock:
            self.error = why
            for each in self._under_way:
                each.done.set()

    def _move(self) -> None:
        """Moves bytes until it is told to end."""
        self._poll.register(self._bell[1], select.POLLIN)
        for connection in self._connections:
            self._poll.register(connection.socket, select.POLLIN)
        while not self._closed:
            for descriptor, events in self._poll.poll():
                if descriptor not in self.by_descriptor:
                    self._take_up()
                else:
                    self._serve(self.by_descriptor[descriptor], events)

    def _serve(self, connection: StreamConnection, events: int) -> None:
        """Receives and sends what a connection is ready for."""
        if connection.parked and events & (select.POLLHUP | select.POLLERR):
            raise Ended(closed_by(connection.peer))
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and not connection.parked:
            self._receive(connection)
        if events & select.POLLOUT and connection.is_open:
            self._send(connection)

    def _take_up(self) -> None:
        """Takes what was submitted, and wakes the connections that it concerns."""
        with suppress(BlockingIOError):
            while self._bell[1].recv(4096):
                pass
        ranks = set()
        with self._lock:
            while self._submitted:
                message = self._submitted.popleft()
                peer = self._peers[message.peer]
                ranks.add(message.peer)
                peer.taken_up = message.number + 1
                if message.sent:
                    peer.outgoing.append(message)
                if message.received:
                    peer.incoming[message.number] = message
        for rank in ranks:
            self._check_reaches(rank)
        pace(self._pacing, self._connections, self._peers)
        for connection in self._connections:
            if connection.peer in ranks and connection.is_open:
                if connection.parked:
                    self._begin(connection)
                self._watch(connection)

    def _watch(self, connection: StreamConnection) -> None:
        reads = 0 if connection.parked else select.POLLIN
        writes = select.POLLOUT if connection.outgoing or self._peers[connection.peer].outgoing else 0
        self._poll.modify(connection.socket, reads | writes)

    def _send(self, connection: StreamConnection) -> None:
        if not connection.outgoing and not self._load(connection):
            self._watch(connection)
            return
        try:
            taken = connection.socket.sendmsg(connection.outgoing)
        except BlockingIOError:
            return
        while connection.outgoing and taken >= len(connection.outgoing[0]):
            taken -= len(connection.outgoing.pop(0))
        if connection.outgoing:
            connection.outgoing[0] = connection.outgoing[0][taken:]
        elif connection.sending is not None:
            connection.sending.book(connection.payload_left)
            connection.sending = None

    def _load(self, connection: StreamConnection) -> bool:
        """Gives a connection its next chunk; whether there was one."""
        peer = self._peers[connection.peer]
        if not peer.outgoing:
            return False
        message = peer.outgoing[0]
        nbytes = chunk_nbytes(sum(each.left for each in peer.outgoing), self.count)
        allow_unsent(connection, max(nbytes, LEAST_UNSENT_NBYTES))
        start, stop = message.next_chunk(nbytes)
        if message.left == 0:
            peer.outgoing.popleft()
            if not any(each.outgoing for each in self._peers.values()):
                self._pacing.end()
        header = HEADER.pack(message.number, start, stop - start)
        connection.outgoing = [memoryview(header), message.sent[start:stop]]
        connection.sending, connection.payload_left = message.exchange, stop - start
        return True

    def _receive(self, connection: StreamConnection) -> None:
        if connection.target is None:
            nbytes = self._read(connection, memoryview(connection.header)[connection.have :])
            connection.have += nbytes
            if connection.have < HEADER.size:
                return
            self._begin(connection)
            if connection.target is None:
                return
        nbytes = self._read(connection, connection.target)
        connection.target = connection.target[nbytes:]
        assert connection.receiving is not None
        receiving, chunk_is_done = connection.receiving, not connection.target
        if chunk_is_done:
            connection.target, connection.have, connection.receiving = None, 0, None
        receiving.book(nbytes)

    def _begin(self, connection: StreamConnection) -> None:
        """Finds where a chunk belongs whose header has come; else has the connection wait for that."""
        number, start, nbytes = HEADER.unpack(connection.header)
        peer = self._peers[connection.peer]
        message = peer.incoming.get(number)
        connection.parked = message is None
        if message is None:
            self._watch(connection)
            return
        if start + nbytes > len(message.received):
            raise Ended(
                f"rank {connection.peer} of the group sends more than the {len(message.received)} bytes asked for"
            )
        connection.target = message.received[start : start + nbytes]
        connection.receiving = message.exchange
        message.to_come -= nbytes
        if message.to_come == 0:
            del peer.incoming[number]

    def _read(self, connection: StreamConnection, into: memoryview) -> int:
        try:
            nbytes = connection.socket.recv_into(into)
        except BlockingIOError:
            return 0
        if nbytes == 0:
            self._close(connection)
        return nbytes

    def _close(self, connection: StreamConnection) -> None:
        """The other end is through with a connection: it has all that it asked for, and has sent all it had.

        That may be known before what it sent over the other connections is here.

        Raises:
            Ended: Something that this rank waits for cannot come any more.
        """
        self._poll.unregister(connection.socket)
        connection.is_open = False
        if connection.have or connection.outgoing:
            raise Ended(closed_by(connection.peer))
        self._check_reaches(connection.peer)

    def _check_reaches(self, rank: int) -> None:
        if self._peers[rank].is_waited_for and not any(each.is_open for each in self._connections if each.peer == rank):
            raise Ended(closed_by(rank))


def pace(pacing: Pacing, connections: Sequence[StreamConnection], peers: Mapping[int, StreamedPeer]) -> None:
    """Has the connections that have something to send share the rate of the path."""
    sending = [
        connection.socket for connection in connections if connection.is_open and peers[connection.peer].outgoing
    ]
    if sending:
        pacing.begin(sending)


def allow_unsent(connection: StreamConnection, unsent_nbytes: int) -> None:
    """Says how much a connection's kernel may hold unsent and still ask for more."""
    if connection.unsent_nbytes != unsent_nbytes:
        connection.socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_nbytes)
        connection.unsent_nbytes = unsent_nbytes


def views_of(pieces: Sequence[tuple[int, Tensor, Tensor]]) -> list[tuple[int, memoryview, memoryview]]:
    """The bytes of what `Streams.exchange` is given."""
    return [(rank, raw(sent), raw(received)) for rank, sent, received in pieces]


def nbytes_of(views: Sequence[tuple[int, memoryview, memoryview]]) -> int:
    """Bytes of an exchange, both ways."""
    return sum(len(sent) + len(received) for _, sent, received in views)


def closed_by(rank: int) -> str:
    """What an exchange ends with whose peer has ended."""
    return f"Connection closed by peer: rank {rank} of the group has ended or given up"


class Ended(Exception):
    """A connection is of no use any more; the text says why."""


class _Pending:
    """Exchanges under way."""

    def __init__(self, streams: Streams, exchanges: Sequence[StreamedExchange], deadline: float) -> None:
        self._streams = streams
        self._exchanges = exchanges
        self._deadline = deadline

    def wait(self) -> None:
        """See `Work.wait`."""
        for exchange in self._exchanges:
            while not exchange.done.wait(1.0):
                alarm = self._streams.alarm
                if alarm is not None and (reason := alarm()):
                    raise PeerError(reason)
                if time.monotonic() > self._deadline:
                    raise RuntimeError("Timed out waiting for another rank's part of an exchange")
            if exchange.left:
                raise RuntimeError(self._streams.error or "the connections were closed")
