"""Connections of one rank in the liveness ring: where its neighbours are, and how both ends prove who they are.

`MemberRecords` are what the ranks publish in the store, `RingConnections` this rank's listener and its connections, and
`Dialer` connects to the neighbours. None of them waits for a neighbour: connecting and receiving do not block.
"""

import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.failures import ABSENT, ENDED, LEFT, UNREACHED, PeerFailure, PeerFailureError
from gradwire.comms.bootstrap.kernel import NOTHING_LISTENS, UNKNOWN
from gradwire.comms.bootstrap.pending_connections import accept
from gradwire.comms.bootstrap.probe import PeerAddress
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.messages import COUNT, Addresses, Kernel, MessageError, MessageType, Most, Port
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES, new_nonce, proof_of

log = logging.getLogger("gradwire")

FIRST_NAP_SECONDS = 0.05
"""Pause before the second poll for a neighbour's address; doubled until the address is published."""

CONNECT_SECONDS = 3.0
"""Timeout of connecting to each address of a neighbour. The ring's thread does other work meanwhile."""

SEND_SECONDS = 0.2
"""Timeout of sending some bytes. The buffer is full only if the peer has read nothing for long."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between two probes, unanswered probes: a host that is gone shows after 11 s."""

BACKLOG = 1024
"""Connections that the kernel queues while the ring's thread waits for the store. With a short queue other clients
could keep a neighbour out; the kernel takes at most `net.core.somaxconn` (4096 since Linux 5.4)."""

MOST_ACCEPTED = 64
"""Connections accepted between two reads: fewer than `MOST_PENDING`, so that a neighbour, which identifies itself as it
connects, is read before it could be closed as surplus."""

ANSWER_SECONDS = 60.0
"""Time for the process that accepted a connection to prove that it is the neighbour: it may hold the GIL for long."""

TOKEN_NBYTES = 16
"""Bytes of a ring's secret, which its rank publishes in the store. Both ends of a connection prove that they know it,
by a challenge. So a port scanner, a service with the same port on another host, or a replay is never a neighbour."""

GREETING = b"gradwire ring 2"
"""First bytes from both ends of a connection. A connection that begins with anything else is closed."""

HELLO_NBYTES = len(GREETING) + 4 + NONCE_NBYTES
"""Bytes of the connecting end's first message: greeting, rank, nonce."""
_REPLY_NBYTES = len(GREETING) + NONCE_NBYTES + PROOF_NBYTES
"""Bytes of the accepting end's reply: greeting, nonce, proof. The connecting end's proof follows."""

JOIN_CHECK_SECONDS = (0.3, 1.0, 3.0)
"""Seconds from the start of a ring, whose ranks wait for each other, until each check with the kernel whether the next
rank is still there, as long as it is not connected. An exit before that shows here, or by a refused connection."""

_RECORD: MessageType[tuple[int, tuple[str, ...], str, str]] = MessageType(
    tuple[Port, Addresses, Kernel, Annotated[str, Most(64)]]
)
"""A rank's record in the store: port, addresses, kernel, and the secret of its ring in hexadecimal digits."""


def rank_state(store: Store, rank: int) -> str:
    """Asks the kernel of a rank's host about its port: `NOTHING_LISTENS`, `LISTENS`, `REFUSED` or `UNKNOWN`.

    Args:
        store: Store of the ring.
        rank: Rank to check; `UNKNOWN` if it has published no record, or a malformed one.

    Raises:
        RuntimeError: The store is unreachable.
    """
    if not store.check([f"alive/{rank}"]):
        return UNKNOWN
    try:
        address, _ = _record(store.get(f"alive/{rank}"))
    except MessageError as error:
        log.debug("the record of rank %d in the store is malformed: %s", rank, error)
        return UNKNOWN
    return address.state()


def _record(text: bytes) -> tuple[PeerAddress, bytes]:
    """Parses a rank's record: its address and its secret.

    Raises:
        MessageError: The record is malformed.
    """
    port, addresses, kernel, token = _RECORD.read(text)
    try:
        return PeerAddress(port, addresses, kernel), bytes.fromhex(token)
    except ValueError:
        raise MessageError("the secret in the record is not hexadecimal") from None


class MemberRecords:
    """Records of the ring's ranks in the store: their addresses, and which have shut down in order.

    Args:
        store: Store of the ring.
        rank: This rank.

    Attributes:
        left: Rank that has shut down -> number of launches that it had started.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.left: dict[int, int] = {}
        self._store = store
        self._rank = rank

    def publish(self, port: int, token: bytes) -> None:
        """Publishes this rank's record: port, addresses, kernel and secret.

        Does not wait for a resolver: addresses that take long to find are left out.

        Raises:
            RuntimeError: The store is unreachable.
        """
        toward = self._store.host if isinstance(self._store, PollingStore) else None
        address = PeerAddress.here(port, toward, 0.0)
        self._store.set(f"alive/{self._rank}", json.dumps([*astuple(address), token.hex()]))

    def publish_shutdown(self, launches: int) -> None:
        """Records in the store that this rank shuts down in order, for ranks that connect later.

        If the store is unreachable, that is only logged.

        Args:
            launches: Number of launches that this rank has started.
        """
        try:
            self._store.set(f"left/{self._rank}", str(launches))
        except RuntimeError as error:
            log.debug("the store was unreachable when rank %d shut down: %s", self._rank, error)

    def has_joined(self, rank: int) -> bool:
        """Returns whether a rank has published its record.

        Raises:
            RuntimeError: The store is unreachable.
        """
        return self._store.check([f"alive/{rank}"])

    def address_of(self, rank: int) -> tuple[PeerAddress, bytes]:
        """Returns the address and the secret of a rank that has joined.

        Raises:
            RuntimeError: The store is unreachable.
            MessageError: The record is malformed.
        """
        return _record(self._store.get(f"alive/{rank}"))

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has recorded that it shut down in order; if so, adds it and its launches to `left`.

        Raises:
            RuntimeError: The store is unreachable.
            MessageError: The recorded number of launches is malformed.
        """
        if not self._store.check([f"left/{rank}"]):
            return False
        self.left[rank] = COUNT.read(self._store.get(f"left/{rank}"))
        return True

    def state_of(self, rank: int) -> str:
        """Returns what `rank_state` says of a rank's port: `NOTHING_LISTENS`, `LISTENS`, `REFUSED` or `UNKNOWN`.

        Raises:
            RuntimeError: The store is unreachable.
        """
        return rank_state(self._store, rank)

    def raise_if_peer_left(self, started: int) -> None:
        """Raises `PeerError` if a rank of `left` shut down before a launch that this rank has started.

        Args:
            started: Launches that this rank has started.
        """
        for rank, launches in self.left.items():
            if started > launches:
                reason = (
                    f"rank {rank} has left after {launches} launches, and rank {self._rank} has started the next one"
                )
                raise failure_error(reason, LEFT, rank)


@dataclass(slots=True, eq=False)
class PeerConnection:
    """State of one connection.

    Attributes:
        rank: Rank at the other end; None until an accepted connection has proved one.
        dialled: Whether this rank made the connection.
        token: Secret of the rank that accepts the connection.
        since: Monotonic time at which it was accepted or connected.
        known: Whether both ends have proved who they are.
        received: Bytes that have arrived and are not handled yet.
        last: Monotonic time at which bytes last arrived.
        hello: First message of the connecting end; empty until it has arrived.
        reply: Greeting and nonce of the accepting end; empty until known.
        connecting: Whether TCP has not connected yet.
    """

    rank: int | None
    dialled: bool
    token: bytes
    since: float
    known: bool = False
    received: bytes = b""
    last: float = 0.0
    hello: bytes = b""
    reply: bytes = b""
    connecting: bool = False

    def proof_of(self, end: str) -> bytes:
        """Returns the proof, valid in this connection only, that one end knows the accepting rank's secret.

        Args:
            end: `caller` for the connecting end, `called` for the accepting end.
        """
        return proof_of(self.token, end, self.hello, self.reply)


class RingConnections:
    """Listener of one rank in the liveness ring, and its connections to the ranks before and after it.

    Thread safety: `send` and `wake` may be called from any thread, everything else from the ring's thread.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        token: Secret of this rank, which its neighbours read in the store.
        peers: Open connections.
        listener: Listening socket.
        selector: Watches all of these; set while the ring's thread runs.
        send_lock: Guards every send and close, so that no thread writes to a descriptor that is closed and reused.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self.token = secrets.token_bytes(TOKEN_NBYTES)
        self.peers: dict[socket.socket, PeerConnection] = {}
        self.selector: selectors.BaseSelector | None = None
        self.send_lock = threading.Lock()  # Guards sends and closes; see above.
        self._rank = rank
        self._waker, self._woken = socket.socketpair()
        self.listener = listener(BACKLOG)
        # A client may disconnect between select() and accept(), which would block then.
        self.listener.setblocking(False)

    def listen(self) -> None:
        """Lets the selector watch the listener and `wake`."""
        assert self.selector is not None
        self.selector.register(self._woken, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def wake(self) -> None:
        """Ends a wait of the selector, and every later one at once; `LivenessRing._closed` ends the thread."""
        self._waker.close()

    def close(self) -> None:
        """Closes all sockets."""
        with self.send_lock:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes this process's copies of all sockets without taking the lock, for a forked child.

        The parent may have held the lock at the fork, and the child has no thread that sends. The parent's connections
        stay open.
        """
        for each in (*self.peers, self.listener, self._woken, self._waker):
            each.close()

    def accept(self, most: int = MOST_ACCEPTED) -> None:
        """Accepts queued connections in their order, and adds each to `peers`; does not wait for one.

        Args:
            most: Number of connections, at most.

        Raises:
            OSError: The listener is closed.
        """
        for _ in range(most):
            if (accepted := accept(self.listener)) is None:
                return
            self.add(accepted, PeerConnection(None, False, self.token, time.monotonic()))

    def add(self, connection: socket.socket, peer: PeerConnection) -> None:
        """Adds a connection to `peers`, and registers it with `selector`, so that the ring's thread handles its events.

        Args:
            connection: Socket that was accepted, or that is connecting without blocking.
            peer: State of the connection. If `peer.connecting`, the event waited for is that TCP has connected, else
                bytes.
        """
        if not peer.connecting:
            _configure(connection)
        self.peers[connection] = peer
        assert self.selector is not None
        self.selector.register(connection, selectors.EVENT_WRITE if peer.connecting else selectors.EVENT_READ)

    def finish_connecting(self, connection: socket.socket, peer: PeerConnection) -> None:
        """Sends the first message over a connection that TCP has made.

        If the attempt or the sending failed, the connection is closed and removed from `peers`, and `peer` does not
        change; `Dialer.advance` then tries the next address.

        Args:
            connection: Socket of the attempt, writable because the attempt has ended.
            peer: State of the connection. On success `connecting` becomes False, and `since` is now.
        """
        assert self.selector is not None
        try:
            if number := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            _configure(connection)
            connection.sendall(peer.hello)
        except OSError as error:
            log.debug("rank %d cannot reach rank %s: %s", self._rank, peer.rank, error)
            self.hang_up(connection)
            return
        peer.connecting, peer.since = False, time.monotonic()
        self.selector.modify(connection, selectors.EVENT_READ)

    def handshake(self, connection: socket.socket, peer: PeerConnection) -> bool:
        """Continues the handshake with what has arrived, and returns whether the connection may stay open.

        Sends this end's next message once the other end's is complete. When both ends have proved who they are,
        `peer.known` is true, and `peer.received` keeps the bytes that follow the handshake. Does not close anything.
        """
        awaits_proof = bool(peer.hello) and not peer.dialled
        if not awaits_proof and not GREETING.startswith(peer.received[: len(GREETING)]):
            return False
        # The connecting end: check the reply, and prove in turn.
        if peer.dialled:
            if len(peer.received) < _REPLY_NBYTES:
                return True
            reply, peer.received = peer.received[:_REPLY_NBYTES], peer.received[_REPLY_NBYTES:]
            peer.reply = reply[:-PROOF_NBYTES]
            if not hmac.compare_digest(reply[-PROOF_NBYTES:], peer.proof_of("called")):
                return False
            # Invariant: the proof is the first thing sent; the heartbeat thread sends to known peers only.
            self.send(connection, peer.proof_of("caller"))
            peer.known = True
            return True
        # The accepting end: reply to the hello, then check the proof.
        if not peer.hello:
            if len(peer.received) < HELLO_NBYTES:
                return True
            if (answer := self.reply_to(peer)) is None:
                return False
            self.send(connection, answer)
        if len(peer.received) < PROOF_NBYTES:
            return True
        proof, peer.received = peer.received[:PROOF_NBYTES], peer.received[PROOF_NBYTES:]
        if not hmac.compare_digest(proof, peer.proof_of("caller")):
            return False
        rank = _claimed(peer)
        # The first connection to prove a rank is that rank's.
        if self._has(rank):
            return False
        peer.rank, peer.known = rank, True
        return True

    def reply_to(self, peer: PeerConnection) -> bytes | None:
        """Takes the connecting end's first message from `peer.received`, and returns the reply.

        Args:
            peer: State of an accepted connection; `hello`, `received` and `reply` are set.

        Returns:
            Greeting, nonce and proof; None if the rank that the message claims is out of range, this one, or connected
            already.
        """
        peer.hello, peer.received = peer.received[:HELLO_NBYTES], peer.received[HELLO_NBYTES:]
        rank = _claimed(peer)
        if not rank < self._size or rank == self._rank or self._has(rank):
            return None
        peer.reply = GREETING + new_nonce()
        return peer.reply + peer.proof_of("called")

    def _has(self, rank: int) -> bool:
        """Returns whether a rank has connected to this one and proved that it is that rank."""
        return any(each.known and not each.dialled and each.rank == rank for each in self.peers.values())

    def hang_up(self, connection: socket.socket) -> None:
        """Closes a connection, and removes it from `peers` and from the selector."""
        assert self.selector is not None
        self.selector.unregister(connection)
        del self.peers[connection]
        with self.send_lock:
            connection.close()

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Sends bytes to the other end; a broken connection is ignored here and shows when it is read."""
        try:
            with self.send_lock:
                connection.sendall(data)
        except OSError as error:
            log.debug("rank %d could not send to a neighbour: %s", self._rank, error)


class Neighbour:
    """Holds the state of this rank's attempts to connect to another rank of the liveness ring.

    Args:
        rank: The other rank.

    Attributes:
        rank: The other rank.
        addresses: (IP address, port, secret) of each address not tried yet; None until the rank's record was read.
        tried: Port and all addresses of the record, as text for messages.
        settled: Whether no further attempt is made: the rank has proved who it is, all its addresses have failed, or
            its record cannot be read.
        answered: Whether the rank has proved who it is.
        checks: (monotonic seconds at which it is due, whether it is the last) of each check still to come whether the
            rank has joined the ring.
        may_be_unreached: Whether the last check passes if the rank has joined and is unreachable: its failure then
            shows to other ranks or by timeouts.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.addresses: deque[tuple[str, int, bytes]] | None = None
        self.tried = ""
        self.settled = False
        self.answered = False
        self.checks: deque[tuple[float, bool]] = deque()
        self.may_be_unreached = False

    def expect(self, join_seconds: float | None, may_be_unreached: bool) -> None:
        """Schedules the checks, made by `Dialer.check_next`, whether the neighbour has joined the ring.

        Each of them ends the ring if the neighbour's process has exited, the last one also for the reasons below.

        Args:
            join_seconds: Seconds from now until the last check, which fails if the neighbour has not joined or is
                unreachable. None makes no such check, so that only timeouts end the ring.
            may_be_unreached: Whether the last check passes if the neighbour has joined and is unreachable.
        """
        self.may_be_unreached = may_be_unreached
        began = time.monotonic()
        self.checks += [(began + seconds, False) for seconds in JOIN_CHECK_SECONDS]
        if join_seconds is not None:
            self.checks.append((began + join_seconds, True))


class Dialer:
    """Connects to the neighbours: waits for their records in the store and tries their addresses, without blocking.

    Args:
        records: Records of the ring's ranks.
        rank: This rank.
        ranks: Ranks to connect to: the next rank, which is also checked until it has joined, and others.
        connections: Connections of this rank.
        poll_seconds: Longest pause between two polls of the store.

    Attributes:
        next: The next rank of the ring.
    """

    def __init__(
        self, records: MemberRecords, rank: int, ranks: Sequence[int], connections: RingConnections, poll_seconds: float
    ) -> None:
        self.next = Neighbour(ranks[0])
        self._records = records
        self._rank = rank
        self._neighbours = [self.next, *map(Neighbour, ranks[1:])]
        self._connections = connections
        self._poll_seconds = poll_seconds
        self._nap_seconds = FIRST_NAP_SECONDS

    @property
    def pause_seconds(self) -> float:
        """Seconds for which the ring's thread may wait for its sockets: until the next poll, check or timeout."""
        has_all = all(each.addresses is not None or each.settled for each in self._neighbours)
        seconds, now = self._poll_seconds if has_all else self._nap_seconds, time.monotonic()
        due = [checks[0][0] for checks in [self.next.checks] if checks]
        due += [each.since + CONNECT_SECONDS for each in self._connections.peers.values() if each.connecting]
        return max(0.0, min([seconds, *(moment - now for moment in due)]))

    def answered(self, rank: int) -> None:
        """Records that a rank has proved who it is, so that no further address of it is tried.

        Args:
            rank: The rank; nothing happens if this rank does not connect to it.
        """
        for each in self._neighbours:
            each.answered = each.answered or each.rank == rank
            each.settled = each.settled or each.answered

    def advance(self) -> None:
        """Starts or gives up connection attempts, as far as that is possible without waiting for a neighbour.

        Raises:
            PeerError: The process of a neighbour exited before it was reached.
        """
        for neighbour in self._neighbours:
            if not neighbour.settled and (neighbour.addresses is not None or self._find(neighbour)):
                self._dial(neighbour)

    def _dial(self, neighbour: Neighbour) -> None:
        """Tries the next address of a neighbour, unless the attempt at the last one still has time.

        If all have failed, no further attempt is made: a warning says so, unless the rank has shut down in order.

        Raises:
            PeerError: All addresses have failed, and the process of the neighbour has exited.
        """
        for connection, peer in list(self._connections.peers.items()):
            if peer.dialled and peer.rank == neighbour.rank:
                limit = CONNECT_SECONDS if peer.connecting else ANSWER_SECONDS
                if time.monotonic() - peer.since < limit:
                    return
                self._connections.hang_up(connection)
        while neighbour.addresses:
            address, port, token = neighbour.addresses.popleft()
            try:
                made = start_connecting(address, port)
            except OSError as error:
                log.debug("rank %d cannot reach rank %d at %s: %s", self._rank, neighbour.rank, address, error)
                continue
            hello = GREETING + self._rank.to_bytes(4, "big") + new_nonce()
            peer = PeerConnection(neighbour.rank, True, token, time.monotonic(), hello=hello, connecting=True)
            self._connections.add(made, peer)
            return
        # All addresses have failed. A rank that shuts down in order says so in the store before it closes its port.
        neighbour.settled = True
        try:
            has_ended = self._records.state_of(neighbour.rank) == NOTHING_LISTENS
            if self._records.has_left(neighbour.rank):
                return
        except RuntimeError as error:
            log.debug("whether rank %d has shut down in order cannot be read from the store: %s", neighbour.rank, error)
            return
        # It joined after the last check, and exited before it was reached.
        if has_ended:
            raise failure_error(f"the process of rank {neighbour.rank} has ended", ENDED, neighbour.rank)
        log.warning(
            "rank %d cannot reach rank %d at %s: a failure of that rank will be reported by another rank, or by the "
            "timeout",
            self._rank,
            neighbour.rank,
            neighbour.tried,
        )

    def check_next(self) -> None:
        """Makes the next check that `Neighbour.expect` has scheduled, if it is due.

        Raises:
            PeerError: The process of the next rank has exited before it was connected, as far as this host's kernel
                knows (a refused connection to another host proves nothing); or, at the last check, the rank has not
                joined, or is unreachable.
            RuntimeError: The store is unreachable.
            MessageError: What the rank has recorded about its shutdown is malformed.
        """
        following = self.next
        if not following.checks or time.monotonic() < following.checks[0][0]:
            return
        _, last = following.checks.popleft()
        if following.answered or self._records.has_left(following.rank):
            return
        if self._records.state_of(following.rank) == NOTHING_LISTENS:
            raise failure_error(f"the process of rank {following.rank} has ended", ENDED, following.rank)
        if last and not self._records.has_joined(following.rank):
            raise failure_error(f"rank {following.rank} did not join", ABSENT)
        if last and not following.may_be_unreached:
            raise failure_error(f"rank {following.rank} is unreachable", UNREACHED)

    def _find(self, neighbour: Neighbour) -> bool:
        """Polls the store for a neighbour's addresses; returns whether they are published, and keeps them if so.

        False, too, if the store or the record cannot be read; then no further attempt is made.
        """
        try:
            if not self._records.has_joined(neighbour.rank):
                self._nap_seconds = min(2 * self._nap_seconds, self._poll_seconds)
                return False
            address, token = self._records.address_of(neighbour.rank)
        except (RuntimeError, MessageError) as error:
            # The store's process has exited, or the neighbour's failure will show to its other neighbour.
            log.debug("the address of rank %d cannot be read from the store: %s", neighbour.rank, error)
            neighbour.settled, neighbour.addresses = True, deque()
            return False
        neighbour.addresses = deque((each, address.port, token) for each in address.to_try())
        neighbour.tried = f"port {address.port} of {', '.join(address.addresses)}"
        return True


def start_connecting(address: str, port: int) -> socket.socket:
    """Starts a TCP connection and returns its non-blocking socket; it is writable once the attempt has ended.

    Args:
        address: IPv4 or IPv6 address.
        port: TCP port.

    Raises:
        OSError: The connection is refused at once, or the address has no route or is not numeric.
    """
    # A number alone: looking up a name would block the ring.
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, place = found[0]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    number = made.connect_ex(place)
    if number not in (0, errno.EINPROGRESS):
        made.close()
        raise OSError(number, os.strerror(number))
    return made


def failure_error(reason: str, source: str, *ranks: int) -> PeerFailureError:
    """Makes the exception for a failure; `source` is one of the sources in failures.py."""
    return PeerFailureError(PeerFailure(reason, source, ranks))


def _configure(connection: socket.socket) -> None:
    """Sets the timeout and keep-alive of a connected socket."""
    connection.settimeout(SEND_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _claimed(peer: PeerConnection) -> int:
    """Returns the rank that the connecting end claims to be, which it may not have proved yet.

    Args:
        peer: State of an accepted connection, whose `hello` is complete: greeting, rank in 4 bytes, nonce.
    """
    return int.from_bytes(peer.hello[len(GREETING) :][:4], "big")
