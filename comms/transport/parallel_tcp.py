"""This module sends messages between two ranks over several TCP connections, for paths with a long round trip.

One connection carries one window of data in each round trip. The window shrinks after a lost packet and starts at ten
segments again after a pause, so over 80 ms and 0.1 % loss one connection gets 8 of 100 Mbit/s. With many connections a
lost packet slows down only one of them. `Streams` cuts a message into chunks and gives each chunk to the connection
that can take more: a slow connection delays one chunk, not a fixed part of the message. Chunks are larger while more
bytes are left, and so is the amount that the kernel buffers, because on a busy machine the background thread may come
late to a connection whose buffer has run empty. Each chunk carries its offset and is received in place, so the bits of
a message do not depend on the connections.

Gloo waits for a ready message of the receiver, which is queued behind the receiver's own data. Here a sender does not
wait: a chunk that arrives before the receiver has posted its memory stays in the kernel's buffer.

Thread safety: `Streams.exchange`, `exchange_twice` and `close` may be called from any thread. One background thread
does all reading and writing; everything but the queue of submitted messages belongs to it.

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
from gradwire.comms.transport.works import Aborted
from gradwire.compressors.base import Work

LEAST_CHUNK_NBYTES, MOST_CHUNK_NBYTES = 2 << 10, 256 << 10
"""Smallest and largest size of a chunk; in between it is the largest power of two up to half of a connection's even
share of the bytes that are left.

Measured with 4 MB over a link of 100 Mbit/s and 20 ms, at a load of 22 on two cores, where the background thread waited
for a processor 0.8 of the time: four connections with chunks of 16 KiB got 0.18 of the link and gloo 0.42; with up to
256 KiB they got 0.34, and larger ones gave no more (2026-11-23). The smallest chunk is small so that every connection
gets a part of a small message: 16 KiB exceed the first window and took one connection two round trips."""

LEAST_UNSENT_NBYTES = 16 << 10
"""Unsent bytes in the kernel's buffer below which a connection takes a chunk, unless a chunk is larger. With more, slow
connections would hold many chunks; with less, a buffer runs empty while the background thread waits for a processor."""

LEAST_RATE = 12.5e6
"""Lower limit of a measured link rate, in bytes per second, when the number of connections is chosen. A probe of some
tens of kilobytes over a long path measures TCP's windows and not the link."""

UNSEEN_RATE = 25e6
"""Link rate that is assumed if none is given or measured, in bytes per second. With 125e6 instead, 64 connections to
each of two other nodes over 20 ms got 0.3 to 0.5 of links of 100 Mbit/s (sums of 4 MB), while 17 connections got 0.9
and gloo 0.7: each of many connections is so slow that the last chunks take long. On 400 Mbit/s, 35 connections between
two nodes got as much as 64: 0.80 and 0.81 (2026-11-24)."""

HEADER = struct.Struct("!QQQ")
"""Header of a chunk: number of its message, its offset in the message, its bytes."""
_HELLO = struct.Struct(f"!I{PROOF_NBYTES}s")
"""First bytes from a rank that connects: its rank, and its proof for the listener's nonce that it knows the token."""
_TCP_NOTSENT_LOWAT = 25
"""Number of the socket option TCP_NOTSENT_LOWAT. Source: Linux include/uapi/linux/tcp.h."""


def chunk_nbytes(left_nbytes: int, connections: int) -> int:
    """Returns the size of the next chunk in bytes: the largest power of two up to half of a connection's even share.

    It is 2 KiB (`LEAST_CHUNK_NBYTES`) at least, even if fewer bytes are left: the caller cuts it to those. It is 256
    KiB (`MOST_CHUNK_NBYTES`) at most.

    Args:
        left_nbytes: Bytes that no connection has been given yet.
        connections: Number of connections to the receiver.
    """
    nbytes = LEAST_CHUNK_NBYTES
    while nbytes < MOST_CHUNK_NBYTES and 4 * nbytes * connections <= left_nbytes:
        nbytes *= 2
    return nbytes


def raw(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor as a view, which keeps the tensor's memory alive."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class StreamListener:
    """A listening socket to which other ranks connect.

    Args:
        family: AF_INET or AF_INET6.
        address: Address of this rank, on the interface that gloo uses.
        backlog: Largest number of connections that wait to be accepted.

    Attributes:
        port: Port of the socket.
        token: Secret of 64 bits; a connection that does not prove that it knows it is closed.
    """

    def __init__(self, family: int, address: str, backlog: int) -> None:
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(backlog)
        self.port: int = self._socket.getsockname()[1]
        self.token = int.from_bytes(os.urandom(8))

    def accept(
        self, wanted: Mapping[int, int], deadline: float, aborted: Aborted | None
    ) -> dict[int, list[socket.socket]]:
        """Waits for connections of other ranks until each has as many as wanted, and returns them by rank.

        Connections without proof of the token, and more than wanted, are closed; after an error all are.

        Args:
            wanted: Rank -> number of connections.
            deadline: Latest time, of `time.monotonic`.
            aborted: Returns the reason why another rank has aborted; called about once a second.

        Raises:
            PeerError: Another rank has aborted.
            RuntimeError: A rank did not connect in time.
        """
        found: dict[int, list[socket.socket]] = {rank: [] for rank in wanted}
        with (
            ExitStack() as unless_all_come,
            closing(PendingConnections(self._socket, lambda heard: _HELLO.size - len(heard), new_nonce)) as pending,
        ):
            while any(len(found[rank]) < count for rank, count in wanted.items()):
                _check_on(deadline, aborted)
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
        """Closes the listening socket."""
        self._socket.close()


def connect(
    family: int, address: str, port: int, token: int, rank: int, count: int, deadline: float, aborted: Aborted | None
) -> list[socket.socket]:
    """Opens several connections to a rank that listens, all at once.

    Args:
        family: AF_INET or AF_INET6.
        address: Address of the other rank.
        port: Port of its `StreamListener`.
        token: Token of its `StreamListener`.
        rank: This rank.
        count: Number of connections.
        deadline: Latest time, of `time.monotonic`.
        aborted: Returns the reason why another rank has aborted; called about once a second.

    Returns:
        The `count` connections, non-blocking.

    Raises:
        PeerError: Another rank has aborted.
        RuntimeError: The other rank was not reached in time.
        OSError: The connection was refused or closed.
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
                _check_on(deadline, aborted)
            if error := each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise _unreached(address, error)
            nonce = _greeting(each, deadline, aborted)
            each.sendall(_HELLO.pack(rank, _proof(token, nonce, rank)))  # 36 bytes into an empty buffer
    except BaseException:
        for each in made:
            each.close()
        raise
    return made


def _greeting(connection: socket.socket, deadline: float, aborted: Aborted | None) -> bytes:
    """Receives and returns the nonce that a `StreamListener` sends first, `NONCE_NBYTES` long.

    Args:
        connection: Connection to the listener, non-blocking.
        deadline: Latest time, of `time.monotonic`.
        aborted: Returns the reason why another rank has aborted; called about once a second.

    Raises:
        PeerError: Another rank has aborted.
        RuntimeError: The nonce did not arrive in time.
        OSError: The listener has closed the connection; it may be another program.
    """
    heard = b""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    while len(heard) < NONCE_NBYTES:
        while not waiting.poll(1000):
            _check_on(deadline, aborted)
        if not (more := connection.recv(NONCE_NBYTES - len(heard))):
            raise OSError(errno.ECONNRESET, "the program that listens at the port of a rank has closed the connection")
        heard += more
    return heard


def _proof(token: int, nonce: bytes, rank: int) -> bytes:
    return proof_of(token.to_bytes(8, "big"), "stream", nonce, rank.to_bytes(4, "big"))


def _unreached(address: str, error: int) -> OSError:
    return OSError(error, f"cannot connect to rank at {address}: {os.strerror(error)}")


def _check_on(deadline: float, aborted: Aborted | None) -> None:
    """Raises a PeerError if another rank has aborted, a RuntimeError if `deadline` is over."""
    if aborted is not None and (reason := aborted()):
        raise PeerError(reason)
    if time.monotonic() > deadline:
        raise RuntimeError(
            "a rank did not open its connections within `timeout`: it has ended, or a firewall is between"
        )


class StreamedMessage:
    """The bytes that are sent to one rank and received from it in one exchange.

    Args:
        peer: The other rank.
        number: Index of the message. Both ranks number their messages to each other in the same order.
        sent: Bytes to send.
        received: Memory for the bytes that arrive.
        exchange: Exchange that this message is part of.

    Attributes:
        to_come: Bytes of `received` whose chunk has not begun to arrive.
        handed_out: Bytes of `sent` that have been given to a connection.
    """

    def __init__(
        self, peer: int, number: int, sent: memoryview, received: memoryview, exchange: "StreamedExchange"
    ) -> None:
        self.peer = peer
        self.number = number
        self.to_come = len(received)
        self.sent = sent
        self.received = received
        self.exchange = exchange
        self.handed_out = 0

    @property
    def left(self) -> int:
        """Bytes of `sent` that no connection has been given."""
        return len(self.sent) - self.handed_out

    def next_chunk(self, nbytes: int) -> tuple[int, int]:
        """Returns (start, stop) of the next at most `nbytes` bytes to send, and counts them as handed out."""
        start, self.handed_out = self.handed_out, min(self.handed_out + nbytes, len(self.sent))
        return start, self.handed_out


class StreamedExchange:
    """An exchange in flight; done when the kernel has taken all bytes to send and all others have arrived.

    Args:
        nbytes: Bytes of all its messages, sent and received.
        then: Called in the background thread when the last byte has been sent or received, before `done` is set; never
            if `nbytes` is 0.

    Attributes:
        left: Bytes that have not been sent or received; above 0 after `done` if the exchange failed.
        done: Set when the exchange is done or has failed.
    """

    def __init__(self, nbytes: int, then: Callable[[], None] | None = None) -> None:
        self.left = nbytes
        self.done = threading.Event()
        self._then = then
        if nbytes == 0:
            self.done.set()

    def book(self, nbytes: int) -> None:
        """Counts bytes that have been sent or received; with the last ones it calls `then`, and sets `done` after that.

        Called by the background thread alone.

        Args:
            nbytes: Payload bytes, all of this exchange.
        """
        self.left -= nbytes
        if self.left == 0:
            if self._then is not None:
                self._then()
                self._then = None  # releases the tensors that it refers to
            self.done.set()


class StreamConnection:
    """One TCP connection to another rank: the rest of the chunk that it sends, and of the one that it receives.

    Args:
        opened: Connected socket.
        peer: The other rank.

    Attributes:
        outgoing: Rest of the header and payload that are being sent.
        sending: Exchange of the chunk that is being sent; None if there is none.
        payload_left: Payload bytes of that chunk, booked when all of it is sent.
        header: Header of the chunk that arrives; `have` of its bytes are there.
        target: Memory for the rest of the chunk that arrives; None until its header and its message are known.
        receiving: Exchange of the chunk that arrives.
        is_open: False once the other end has closed the connection.
        unsent_nbytes: TCP_NOTSENT_LOWAT as last set: the kernel asks for more below that many unsent bytes.
        parked: True while the next chunk belongs to a message that this rank has not submitted yet.
    """

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
        self.parked = False


class StreamedPeer:
    """The messages in flight to and from one rank.

    Attributes:
        numbered: Messages that have been numbered.
        outgoing: Messages with bytes to send, in order.
        incoming: Number -> message with bytes to receive.
    """

    def __init__(self) -> None:
        self.numbered = 0
        self.outgoing: deque[StreamedMessage] = deque()
        self.incoming: dict[int, StreamedMessage] = {}

    @property
    def is_waited_for(self) -> bool:
        """True if bytes are left to be sent to this rank, or to arrive from it."""
        return bool(self.outgoing or self.incoming)


class Streams:
    """Exchanges with other ranks over several connections to each; a background thread sends and receives.

    Args:
        connections: Rank -> connected sockets, the same number at the other end.
        timeout: Time-out of an exchange.
        aborted: Returns the reason why another rank has aborted; called about once a second during the wait
            for an exchange.

    Attributes:
        error: Reason why exchanges fail from now on; None while they work.
        by_descriptor: File descriptor -> connection.
    """

    def __init__(
        self, connections: Mapping[int, Sequence[socket.socket]], timeout: timedelta, aborted: Aborted | None
    ) -> None:
        self._timeout = timeout
        self.aborted = aborted
        self._peers = {rank: StreamedPeer() for rank in connections}
        self._connections = [StreamConnection(each, rank) for rank, sockets in connections.items() for each in sockets]
        for connection in self._connections:
            connection.socket.setblocking(False)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            allow_unsent(connection, LEAST_UNSENT_NBYTES)
        self._submitted: deque[StreamedMessage] = deque()
        self._under_way: list[StreamedExchange] = []
        self._lock = threading.Lock()  # Guards: self._submitted, self._under_way, self.error, StreamedPeer.numbered.
        self._bell = socket.socketpair()
        """A byte sent to the first end wakes the background thread, which polls the second one. Neither end blocks: one
        that is full wakes the thread, too."""
        for end in self._bell:
            end.setblocking(False)
        self._closed = False
        self.error: str | None = None
        self._poll = select.poll()
        self.by_descriptor = {connection.socket.fileno(): connection for connection in self._connections}
        self._pacing = Pacing()
        self._thread = BackgroundThread(
            "gradwire streams",
            self._run,
            without="its connections to other ranks are closed, and exchanges in flight fail",
            on_failure=self._give_up,
            end=self.close,
        )
        self._thread.start()

    @property
    def count(self) -> int:
        """Number of connections to each rank."""
        return len(self._connections) // max(1, len(self._peers))

    def exchange(self, pieces: Sequence[tuple[int, Tensor, Tensor]]) -> Work:
        """Sends tensors to other ranks and receives tensors from them, all at once.

        Args:
            pieces: (Rank, tensor to send, tensor to receive into): contiguous CPU tensors of any dtype and length. The
                other rank calls with the same lengths in the opposite order, and both make their calls in one order.

        Returns:
            A work; neither tensor of a piece may be changed or read before it is done.

        Raises:
            RuntimeError: A connection was lost earlier.
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
        """Exchanges tensors, calls a function, and exchanges again, without the caller's thread in between.

        The memory that the second exchange receives into may be the memory that the first one sends from, if no rank
        sends to it before it has received that.

        Args:
            first: Pieces of the first exchange, see `exchange`; not all of them empty.
            between: Function that is called in the background thread when all of `first` has been sent and received.
            second: Pieces of the second exchange; tensors to send are read after `between`.

        Returns:
            A work; no tensor may be changed or read before it is done.

        Raises:
            RuntimeError: A connection was lost earlier.
        """
        # The second exchange is submitted in two halves: memory to receive into now, because the other ranks may be
        # faster, and bytes to send when the first exchange is done.
        early, late = views_of(first), views_of(second)
        after = StreamedExchange(nbytes_of(late))

        # Called in the background thread after the first exchange.
        def go_on() -> None:
            try:
                between()
            except Exception as error:
                raise Ended(f"the bytes that arrived cannot be processed: {error}") from error
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
        """Returns the messages of an exchange, each with the next number of its rank. Called under the lock."""
        messages = []
        for rank, sent, received in views:
            peer = self._peers[rank]
            messages.append(StreamedMessage(rank, peer.numbered, sent, received, exchange))
            peer.numbered += 1
        return messages

    def _submit(self, messages: Sequence[StreamedMessage], *exchanges: StreamedExchange) -> None:
        """Queues messages for the background thread. Called under the lock.

        Raises:
            RuntimeError: A connection was lost earlier.
        """
        if self.error is not None:
            raise RuntimeError(self.error)
        self._submitted.extend(messages)
        self._under_way = [each for each in self._under_way if not each.done.is_set()] + list(exchanges)

    def _pending(self, *exchanges: StreamedExchange) -> "_Pending":
        return _Pending(self, exchanges, time.monotonic() + self._timeout.total_seconds())

    def close(self) -> None:
        """Has the background thread close the connections and end; exchanges in flight fail. Returns at once.

        May be called from any thread, more than once.
        """
        self._closed = True
        self._nudge()

    def drain(self, seconds: float) -> bool:
        """Closes the connections, and waits until no tensor of an exchange is used any more.

        Args:
            seconds: Longest wait; usually the thread has ended at once.

        Returns:
            Whether the thread has ended.
        """
        self.close()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _nudge(self) -> None:
        """Wakes the background thread, so that it takes the queued messages or ends."""
        with suppress(OSError):  # the pair is full, or the thread has ended and closed it
            self._bell[0].send(b"w")

    def _run(self) -> None:
        """Sends and receives until `close` or the first error, then closes the connections; the thread's body."""
        # Sums between two exchanges run in this thread on every rank; lanes set the same mode.
        torch.set_flush_denormal(False)
        try:
            self._move()
            self._fail("the connections to other ranks were closed")
        except OSError as error:
            self._fail(f"a connection to another rank was lost: {error.strerror or error}")
        except Ended as error:
            self._fail(f"{error}")
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for each in (*(connection.socket for connection in self._connections), *self._bell):
            each.close()

    def _give_up(self, error: BaseException) -> None:
        """Fails all exchanges after an error of the thread, which may not have been started."""
        self._fail(f"the thread of the connections to other ranks has failed: {type(error).__name__}: {error}")
        self._close_sockets()

    def _fail(self, why: str) -> None:
        """Ends all exchanges in flight, and fails later ones, with the reason `why`."""
        with self._lock:
            self.error = why
            for each in self._under_way:
                each.done.set()

    def _move(self) -> None:
        """Sends and receives until `close` is called."""
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
        """Receives from, and sends over, a connection that is ready for it.

        Args:
            connection: The connection.
            events: Bits of `select.poll`: what it is ready for.

        Raises:
            Ended: A parked connection was closed by the other rank.
        """
        if connection.parked and events & (select.POLLHUP | select.POLLERR):
            raise Ended(closed_by(connection.peer))
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and not connection.parked:
            self._receive(connection)
        if events & select.POLLOUT and connection.is_open:
            self._send(connection)

    def _take_up(self) -> None:
        """Takes the messages that were submitted, and polls their connections for sending and receiving."""
        with suppress(BlockingIOError):
            while self._bell[1].recv(4096):
                pass
        ranks = set()
        with self._lock:
            while self._submitted:
                message = self._submitted.popleft()
                peer = self._peers[message.peer]
                ranks.add(message.peer)
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
        """Polls a connection for receiving unless it is parked, and for sending if there are bytes to send."""
        reads = 0 if connection.parked else select.POLLIN
        writes = select.POLLOUT if connection.outgoing or self._peers[connection.peer].outgoing else 0
        self._poll.modify(connection.socket, reads | writes)

    def _send(self, connection: StreamConnection) -> None:
        """Sends as many bytes as the kernel takes of the connection's present chunk, or of its next one."""
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
        """Gives a connection its next chunk; returns False if there is none.

        Also sets how many unsent bytes the connection may hold, and ends the measurement of `Pacing` with the last
        chunk of all messages.
        """
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
        """Receives what has arrived: the rest of a header, then the bytes of its chunk into the message's memory."""
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
        """Finds the memory for a chunk whose header has arrived; parks the connection if its message is not there yet.

        Forgets a message of which all chunks have begun to arrive.

        Raises:
            Ended: The chunk is outside of the message's memory.
        """
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
        """Receives into `into`, and returns the number of bytes; 0 if none has arrived, or the connection has ended.

        In the latter case it is polled no longer, and `Ended` is raised if bytes are missing; see `_close`.
        """
        try:
            nbytes = connection.socket.recv_into(into)
        except BlockingIOError:
            return 0
        if nbytes == 0:
            self._close(connection)
        return nbytes

    def _close(self, connection: StreamConnection) -> None:
        """Handles the end of a connection: the other rank has received all that it waits for, and sent all that it had.

        Chunks that it sent over other connections may still be on their way.

        Raises:
            Ended: Bytes that this rank waits for can no longer arrive.
        """
        self._poll.unregister(connection.socket)
        connection.is_open = False
        if connection.have or connection.outgoing:
            raise Ended(closed_by(connection.peer))
        self._check_reaches(connection.peer)

    def _check_reaches(self, rank: int) -> None:
        """Raises `Ended` if bytes are left for or from a rank to which no connection is open."""
        if self._peers[rank].is_waited_for and not any(each.is_open for each in self._connections if each.peer == rank):
            raise Ended(closed_by(rank))


def pace(pacing: Pacing, connections: Sequence[StreamConnection], peers: Mapping[int, StreamedPeer]) -> None:
    """Limits the connections that have bytes to send together to the rate of the path; see `Pacing.begin`.

    Args:
        pacing: Measures and sets the limit.
        connections: All connections to other ranks.
        peers: Rank -> its messages in flight.
    """
    sending = [
        connection.socket for connection in connections if connection.is_open and peers[connection.peer].outgoing
    ]
    if sending:
        pacing.begin(sending)


def allow_unsent(connection: StreamConnection, unsent_nbytes: int) -> None:
    """Sets the number of unsent bytes in the kernel below which a connection is polled as ready to send."""
    if connection.unsent_nbytes != unsent_nbytes:
        connection.socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_nbytes)
        connection.unsent_nbytes = unsent_nbytes


def views_of(pieces: Sequence[tuple[int, Tensor, Tensor]]) -> list[tuple[int, memoryview, memoryview]]:
    """Returns the pieces of `Streams.exchange` as bytes."""
    return [(rank, raw(sent), raw(received)) for rank, sent, received in pieces]


def nbytes_of(views: Sequence[tuple[int, memoryview, memoryview]]) -> int:
    """Returns the bytes of an exchange, sent and received."""
    return sum(len(sent) + len(received) for _, sent, received in views)


def closed_by(rank: int) -> str:
    """Returns the error text for a connection that `rank` has closed."""
    return f"Connection closed by peer: rank {rank} of the group has ended or given up"


class Ended(Exception):
    """Raised in the background thread when a connection has become unusable; the text is the reason."""


class _Pending:
    """A work for exchanges in flight."""

    def __init__(self, streams: Streams, exchanges: Sequence[StreamedExchange], deadline: float) -> None:
        self._streams = streams
        self._exchanges = exchanges
        self._deadline = deadline

    def wait(self) -> None:
        """Waits until all messages have been sent and received.

        Raises:
            PeerError: Another rank has aborted.
            RuntimeError: A connection was lost, or the time-out is over.
        """
        for exchange in self._exchanges:
            while not exchange.done.wait(1.0):
                aborted = self._streams.aborted
                if aborted is not None and (reason := aborted()):
                    raise PeerError(reason)
                if time.monotonic() > self._deadline:
                    raise RuntimeError("Timed out waiting for another rank's part of an exchange")
            if exchange.left:
                raise RuntimeError(self._streams.error or "the connections were closed")
