"""Notices within a second that the process of another rank has ended, where collectives themselves do not say so.

A collective of NCCL waits on the device for a rank that is gone, and nobody is told. So every rank keeps a connection
to the rank after it and one to the rank before it. The kernel closes the connections of a process that ends, however it
ends; a host that disappears shows by TCP's keep-alive. A process that is merely slow keeps its connections, so there is
no false alarm. What two neighbours see goes on along the ring, and reaches all others through the store as well.

A rank that leaves in order says how many launches it has started: it is missed only by a rank that starts another.
"""

import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated

import torch

from gradwire.comms.bootstrap.addresses import listener, own_addresses
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.failure_reporter import POLL_SECONDS, poll_seconds
from gradwire.comms.bootstrap.failures import (
    ABSENT,
    BROKEN,
    LEFT,
    LONGEST_FAILURE_NBYTES,
    OVER,
    OVERDUE,
    SILENT,
    UNREACHED,
    Failures,
    PeerFailure,
    PeerFailureError,
    Source,
)
from gradwire.comms.bootstrap.failures import ENDED as HAS_ENDED
from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.comms.bootstrap.kernel import ENDED, LISTENS, UNKNOWN, listener_state, own_kernel, to_call
from gradwire.comms.bootstrap.pending_connections import accept, to_close
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.messages import Addresses, Count, Kernel, MessageError, MessageType, Most, Port
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES, new_nonce, proof_of
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

FIRST_NAP_SECONDS = 0.05
"""Seconds before the second look for the next rank's address; doubled until it is there."""

CONNECT_SECONDS = 3.0
"""Seconds for each address of the next rank."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between questions, unanswered questions: a host that is gone shows after 11 s."""

CLOSING_SECONDS, LEAST_CLOSING_SECONDS = 0.2, 0.001
"""Seconds for all who have called to say who they are, while this rank leaves; and for each of them, where one takes it
all."""

BACKLOG = 1024
"""Callers that the kernel keeps while the thread calls a neighbour itself, which takes `CONNECT_SECONDS` for each
address, or asks the store. With few places others would keep a neighbour out meanwhile; the kernel has
`net.core.somaxconn` at most (4096 since Linux 5.4)."""

CALLERS_AT_ONCE = 64
"""Callers that are let in between two looks at what others have said: fewer than `MOST_PENDING`, so that a neighbour
among them, which says its name with its call, is heard before it could be turned away."""

CLOSING_CALLERS = 16
"""Who wait to be let in then, at most: the two neighbours, and others."""

CLOSING_POLLS = (0.0, 0.02, 0.08)
"""Seconds before each look whether a process whose connection has ended listens still: its kernel closes one after the
other."""

ANSWER_SECONDS = 60.0
"""Seconds for whoever was reached at an address of the next rank to answer: the next rank may hold the GIL for a
while."""

TOKEN_NBYTES = 16
"""Bytes of a ring's secret, which its rank says in the store. Who connects proves that it knows it, and so does who is
called, by a challenge: a port scanner, a service that has the same port on another host, or one that repeats what it
has captured, is nobody's neighbour."""

GREETING = b"gradwire ring 2"
"""What both ends of a connection say at first: another program says something else, and is hung up on at once."""

_HELLO_NBYTES = len(GREETING) + 4 + NONCE_NBYTES
"""Bytes of a caller's first word: the greeting, its rank, its nonce."""
_REPLY_NBYTES = len(GREETING) + NONCE_NBYTES + PROOF_NBYTES
"""Bytes of the reply: the greeting, the nonce and the proof of who is called. The caller's proof follows."""

GOODBYE, LOST, HERE = b".", b"!", b"~"
"""First byte of what is said: behind it the number of launches, 8 bytes; or a length, 4 bytes, and JSON; or nothing."""

FROZEN_SECONDS = 10.0
"""Seconds for which a rank with a connection says nothing while this one waits, before it is given up: its process is
stopped. Much longer than a thread waits for the GIL."""


COMING_SECONDS = (0.3, 1.0, 3.0)
"""Seconds from the beginning of a ring, whose ranks wait for each other, until a rank asks its kernel whether the next
one is still there that it has not reached yet. One that ends before it is reached is seen by this, or by a call to it
that is refused."""

Lost = Callable[[Exception], None]
"""Called once, from the ring's thread, with what happened: a `PeerFailureError`, or what a source has raised."""


def rank_state(store: Store, rank: int) -> str:
    """What is known of whether a rank lives: `ENDED`, `LISTENS`, `REFUSED` or `UNKNOWN`, as `listener_state` says.

    Args:
        store: The ring's.
        rank: Which.

    Raises:
        RuntimeError: The store is gone.
    """
    if not store.check([f"alive/{rank}"]):
        return UNKNOWN
    try:
        port, addresses, kernel, _ = _ALIVE.read(store.get(f"alive/{rank}"))
    except MessageError as error:
        log.debug("rank %d has not said where it is: %s", rank, error)
        return UNKNOWN
    return listener_state(kernel, port, addresses)


_ALIVE: MessageType[tuple[int, tuple[str, ...], str, str]] = MessageType(
    tuple[Port, Addresses, Kernel, Annotated[str, Most(64)]]
)
"""Where a rank is: its port, its addresses, its kernel, and the secret of its ring in hexadecimal digits."""
_LAUNCHES: MessageType[int] = MessageType(Count)


class _Register:
    """What the ring's ranks have said of themselves in the store: where they are, and that they leave in order.

    Args:
        store: The ring's.
        rank: This rank.

    Attributes:
        left: Rank that has left -> how many launches it had started.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.left: dict[int, int] = {}
        self._store = store
        self._rank = rank

    def come(self, port: int, token: bytes) -> None:
        """Says where this rank is, at once: what a resolver takes long for is left out."""
        toward = self._store.host if isinstance(self._store, PollingStore) else None
        where = [port, own_addresses(toward, 0.0), own_kernel(), token.hex()]
        self._store.set(f"alive/{self._rank}", json.dumps(where))

    def leave(self, launches: int) -> None:
        """Says goodbye, to ranks that come later."""
        try:
            self._store.set(f"left/{self._rank}", str(launches))
        except RuntimeError as error:
            log.debug("the store was gone before rank %d said goodbye: %s", self._rank, error)

    def has_come(self, rank: int) -> bool:
        """Whether a rank has said where it is.

        Raises:
            RuntimeError: The store is gone.
        """
        return self._store.check([f"alive/{rank}"])

    def place_of(self, rank: int) -> tuple[int, list[str], str, bytes]:
        """A rank's port, its addresses, its kernel, and what it wants to be shown, once it has come.

        Raises:
            RuntimeError: The store is gone.
            MessageError: It has said something else.
        """
        port, addresses, kernel, token = _ALIVE.read(self._store.get(f"alive/{rank}"))
        try:
            return port, list(addresses), kernel, bytes.fromhex(token)
        except ValueError:
            raise MessageError(f"rank {rank} has said no secret") from None

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said goodbye; notes how many launches it had started.

        Raises:
            RuntimeError: The store is gone.
        """
        if not self._store.check([f"left/{rank}"]):
            return False
        self.left[rank] = _LAUNCHES.read(self._store.get(f"left/{rank}"))
        return True

    def state_of(self, rank: int) -> str:
        """What is known of whether a rank lives; see `rank_state`."""
        return rank_state(self._store, rank)

    def miss_who_left(self, started: int) -> None:
        """Raises a PeerError where a rank has left before the last launch that this one has started."""
        for rank, launches in self.left.items():
            if started > launches:
                reason = (
                    f"rank {rank} has left after {launches} launches, and rank {self._rank} has started the next one"
                )
                raise _failure_error(reason, LEFT, rank)


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection.

    Attributes:
        rank: At its other end; None until a caller has said so.
        dialled: This rank has made the connection.
        token: Of the rank that was called.
        since: When it was made.
        known: Both ends are sure of each other.
        hello: The caller's first word; empty until it has come.
        reply: The greeting and the nonce of who is called; empty until they are known.
        heard: What has arrived and was not understood yet.
        last: When something has arrived.
    """

    rank: int | None
    dialled: bool
    token: bytes
    since: float
    known: bool = False
    heard: bytes = b""
    last: float = 0.0
    hello: bytes = b""
    reply: bytes = b""

    def proof_of(self, end: str) -> bytes:
        """What proves, in this connection, that one end knows the secret of the rank that was called.

        Args:
            end: `caller` or `called`.
        """
        return proof_of(self.token, end, self.hello, self.reply)


class _Neighbour:
    """A rank that this one connects to.

    Args:
        rank: Which.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.addresses: deque[tuple[str, int, bytes]] | None = None
        """Those that have not been tried yet; None until they are known."""
        self.tried = ""
        self.reached = False
        """It has answered, or nothing more is tried."""
        self.answered = False
        self.looks: deque[tuple[float, bool]] = deque()
        """When to look whether it comes, and whether its silence ends the ring then."""
        self.may_be_unreached = False
        """Its silence does not, once it has come."""

    def expect(self, comes_within: float | None, may_be_unreached: bool) -> None:
        """Looks after it from now on; see `LivenessRing`."""
        self.may_be_unreached = may_be_unreached
        began = time.monotonic()
        self.looks += [(began + seconds, False) for seconds in COMING_SECONDS]
        if comes_within is not None:
            self.looks.append((began + comes_within, True))

    def is_due(self) -> bool:
        """Whether it is time for a look."""
        return bool(self.looks) and time.monotonic() >= self.looks[0][0]


class _Ends:
    """One rank's port in the ring, and its ends of the connections with its neighbours.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        token: Its secret, which its neighbours know.
        peers: Its connections.
        listener: At its port.
        selector: Of all of these, while the ring's thread runs.
        telling: Held while something is said, or a connection is closed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self.token = secrets.token_bytes(TOKEN_NBYTES)
        self.peers: dict[socket.socket, _Peer] = {}
        self.selector: selectors.BaseSelector | None = None
        self.telling = threading.Lock()
        self._rank = rank
        self._waker, self._woken = socket.socketpair()
        self.listener = listener(BACKLOG)
        self.listener.setblocking(False)  # who has called may have gone before he is let in

    def listen(self) -> None:
        """Has the selector wake where somebody calls, or `wake` is called."""
        assert self.selector is not None
        self.selector.register(self._woken, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def wake(self) -> None:
        """Ends a wait of the selector; any thread."""
        self._waker.close()

    def close(self) -> None:
        """Closes everything."""
        for each in (*self.peers, self.listener, self._woken, self._waker):
            each.close()

    def accept(self, most: int = CALLERS_AT_ONCE) -> None:
        """Lets in those who have called, in the order of their calls."""
        for _ in range(most):
            if (accepted := accept(self.listener)) is None:
                return
            self.watch(accepted, _Peer(None, False, self.token, time.monotonic()))

    def watch(self, connection: socket.socket, peer: _Peer) -> None:
        """Takes in a connection that was made here, or let in."""
        connection.settimeout(CONNECT_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.peers[connection] = peer
        assert self.selector is not None
        self.selector.register(connection, selectors.EVENT_READ)

    def meet(self, connection: socket.socket, peer: _Peer) -> bool:
        """Goes on with the introduction of two ends that do not know each other; whether the connection stays.

        The rest of what was heard stays in `peer.heard` once `peer.known` is true.
        """
        introduced = bool(peer.hello) and not peer.dialled  # then the caller's proof is to come
        if not introduced and not GREETING.startswith(peer.heard[: len(GREETING)]):
            return False
        if peer.dialled:
            if len(peer.heard) < _REPLY_NBYTES:
                return True
            reply, peer.heard = peer.heard[:_REPLY_NBYTES], peer.heard[_REPLY_NBYTES:]
            peer.reply = reply[:-PROOF_NBYTES]
            if not hmac.compare_digest(reply[-PROOF_NBYTES:], peer.proof_of("called")):
                return False
            self.tell(connection, peer.proof_of("caller"))  # before the pulse's thread says anything
            peer.known = True
            return True
        if not peer.hello:
            if len(peer.heard) < _HELLO_NBYTES:
                return True
            if (said := self.reply_to(peer)) is None:
                return False
            self.tell(connection, said)
        if len(peer.heard) < PROOF_NBYTES:
            return True
        proof, peer.heard = peer.heard[:PROOF_NBYTES], peer.heard[PROOF_NBYTES:]
        if not hmac.compare_digest(proof, peer.proof_of("caller")):
            return False
        rank = _claimed(peer)
        if self._has(rank):  # the first one to prove it is it
            return False
        peer.rank, peer.known = rank, True
        return True

    def reply_to(self, peer: _Peer) -> bytes | None:
        """Takes a caller's first word, which has come whole; the reply, or None where no such rank may call."""
        peer.hello, peer.heard = peer.heard[:_HELLO_NBYTES], peer.heard[_HELLO_NBYTES:]
        rank = _claimed(peer)
        if not rank < self._size or rank == self._rank or self._has(rank):
            return None
        peer.reply = GREETING + new_nonce()
        return peer.reply + peer.proof_of("called")

    def _has(self, rank: int) -> bool:
        """Whether a rank has called that has proved that it is it."""
        return any(each.known and not each.dialled and each.rank == rank for each in self.peers.values())

    def hang_up(self, connection: socket.socket) -> None:
        """Closes a connection."""
        assert self.selector is not None
        self.selector.unregister(connection)
        del self.peers[connection]
        with self.telling:
            connection.close()

    def tell(self, connection: socket.socket, said: bytes) -> None:
        """Says something to whoever is at the other end; any thread."""
        try:
            with self.telling:
                connection.sendall(said)
        except OSError as error:  # what has ended shows when it is read
            log.debug("rank %d could not tell a neighbour: %s", self._rank, error)


class _Calls:
    """This rank's way to its neighbours: it looks for where they are, and calls them until they answer.

    Args:
        register: Of the ring.
        rank: This rank.
        ranks: Those to be called: the next one, which is looked after until it has come, and others.
        ends: Of this rank.
        poll_seconds: Seconds between two looks at the store, at most.
    """

    def __init__(self, register: _Register, rank: int, ranks: Sequence[int], ends: _Ends, poll_seconds: float) -> None:
        self.next = _Neighbour(ranks[0])
        self._register = register
        self._rank = rank
        self._neighbours = [self.next, *map(_Neighbour, ranks[1:])]
        self._ends = ends
        self._poll_seconds = poll_seconds
        self._nap_seconds = FIRST_NAP_SECONDS

    @property
    def pause_seconds(self) -> float:
        """Seconds until the next look is due."""
        knows_all = all(each.addresses is not None or each.reached for each in self._neighbours)
        seconds = self._poll_seconds if knows_all else self._nap_seconds
        if looks := self.next.looks:
            seconds = min(seconds, max(0.0, looks[0][0] - time.monotonic()))
        return seconds

    def answered(self, rank: int) -> None:
        """Notes that a neighbour has answered."""
        for each in self._neighbours:
            each.answered = each.answered or each.rank == rank
            each.reached = each.reached or each.answered

    def go_on(self) -> None:
        """Goes on connecting to the neighbours; between two looks, because they may never come."""
        for neighbour in self._neighbours:
            if not neighbour.reached and (neighbour.addresses is not None or self._find(neighbour)):
                self._call(neighbour)

    def _call(self, neighbour: _Neighbour) -> None:
        """Tries the next address of a neighbour, unless it is to answer at the last one still."""
        for connection, peer in list(self._ends.peers.items()):
            if peer.dialled and peer.rank == neighbour.rank:
                if time.monotonic() - peer.since < ANSWER_SECONDS:
                    return
                self._ends.hang_up(connection)
        while neighbour.addresses:
            address, port, token = neighbour.addresses.popleft()
            try:
                made = socket.create_connection((address, port), CONNECT_SECONDS)
                hello = GREETING + self._rank.to_bytes(4, "big") + new_nonce()
                made.sendall(hello)
            except OSError as error:
                log.debug("rank %d cannot reach rank %d at %s: %s", self._rank, neighbour.rank, address, error)
                if neighbour.addresses and self.next.is_due():
                    return  # and goes on behind that look
                continue
            self._ends.watch(made, _Peer(neighbour.rank, True, token, time.monotonic(), hello=hello))
            return
        neighbour.reached = True
        try:
            has_ended = self._register.state_of(neighbour.rank) == ENDED
            if self._register.has_left(neighbour.rank):  # who leaves in order says so before it goes
                return
        except RuntimeError as error:
            log.debug("the store cannot say whether rank %d has left in order: %s", neighbour.rank, error)
            return
        if has_ended:  # it came after the last look, and ended before it was reached
            raise _failure_error(f"the process of rank {neighbour.rank} has ended", HAS_ENDED, neighbour.rank)
        log.warning(
            "rank %d cannot reach rank %d at %s: if that rank is lost, this one hears of it from another rank or by "
            "the time-out",
            self._rank,
            neighbour.rank,
            neighbour.tried,
        )

    def look_for_next(self) -> None:
        """Misses the next rank where it has ended before it was reached, or cannot be reached for long.

        On another host, where this kernel knows nothing of it, it is not missed: all ranks are to say that they live.
        """
        following = self.next
        if not following.is_due():
            return
        _, last = following.looks.popleft()
        if following.answered or self._register.has_left(following.rank):
            return
        if self._register.state_of(following.rank) == ENDED:
            raise _failure_error(f"the process of rank {following.rank} has ended", HAS_ENDED, following.rank)
        if last and not self._register.has_come(following.rank):
            raise _failure_error(f"rank {following.rank} did not join", ABSENT)
        if last and not following.may_be_unreached:
            raise _failure_error(f"rank {following.rank} is unreachable", UNREACHED)

    def _find(self, neighbour: _Neighbour) -> bool:
        """Looks for the addresses of a neighbour; whether they are there."""
        try:
            if not self._register.has_come(neighbour.rank):
                self._nap_seconds = min(2 * self._nap_seconds, self._poll_seconds)
                return False
            port, addresses, kernel, token = self._register.place_of(neighbour.rank)
        except (RuntimeError, MessageError) as error:  # its server has left, or its failure will show to its neighbours
            log.debug("the store cannot say where rank %d is: %s", neighbour.rank, error)
            neighbour.reached, neighbour.addresses = True, deque()
            return False
        neighbour.addresses = deque((each, port, token) for each in to_call(kernel, addresses))
        neighbour.tried = f"port {port} of {', '.join(addresses)}"
        return True


class _Pulse:
    """Says to the neighbours that this process is there, and misses one that does not: its process may be stopped.

    Whatever the ring's thread waits for, the store or a connection, a thread of its own says so. Where that thread
    itself was held up, the whole process was, or its machine; the neighbours may have been, too, and get their time
    anew.

    Args:
        rank: This rank.
        ends: Of this rank.
        seconds: Seconds between two words.
        waited: For how many seconds this rank has been waiting for others.
    """

    def __init__(self, rank: int, ends: _Ends, seconds: float, waited: Callable[[], float]) -> None:
        self._ends = ends
        self._seconds = seconds
        self._waited = waited
        self._ended = threading.Event()
        self._resumed = time.monotonic()
        self._failed = False
        """Whether its thread has ended by an exception: then the ring's thread says it, as often as it looks."""
        BackgroundThread(
            f"gradwire pulse {rank}",
            self._run,
            without="the thread of the liveness ring tells its neighbours that this process is there, if more rarely",
            on_failure=self._fail,
            awaited=False,
        ).start()

    def end(self) -> None:
        """Says nothing more; any thread."""
        self._ended.set()

    def miss_silent(self) -> None:
        """Misses a neighbour that says nothing while this rank waits, and while this process runs."""
        waited, patience = self._waited(), max(FROZEN_SECONDS, 3 * self._seconds)
        for peer in self._ends.peers.values():
            silent = time.monotonic() - max(peer.last, self._resumed)
            if peer.known and waited > patience and silent > patience:
                rank = _sure(peer.rank)
                raise _failure_error(
                    f"rank {rank} has said nothing for {silent:.0f} s: its process is stopped", SILENT, rank
                )

    def speak_if_failed(self) -> None:
        """Says that this process is there where the thread that does so has failed; the ring's thread."""
        if self._failed:
            self._speak()

    def _fail(self, error: BaseException) -> None:
        self._failed = True

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._seconds):
            now = time.monotonic()
            if now - before > 2 * self._seconds:
                self._resumed = now
            before = now
            self._speak()

    def _speak(self) -> None:
        for connection, peer in list(self._ends.peers.items()):
            if peer.known:
                self._ends.tell(connection, HERE)


class LivenessRing:
    """One rank's end of the ring.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        size: Number of ranks.
        failures: What this rank knows of failures; the ring ends with the first one.
        lost: Called when a rank is gone.
        sources: Asked once a second besides, by the ring's thread alone.
        launches: How many launches this rank has started; all ranks start the same ones.
        waited: For how many seconds this rank has been waiting for others. With it neighbours tell each other that they
            are there, and who says nothing is missed: the process may be stopped. None leaves that to time-outs.
        across: A rank on another host, to be connected to besides: of a host that is lost as a whole nobody is left who
            could say which processes have ended with it.
        comes_within: After so many seconds a next rank that has not come to this ring, or that cannot be reached, ends
            the ring, with nobody missing; None leaves that to time-outs.
        may_be_unreached: A next rank that has come, and cannot be reached, is left to time-outs all the same.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        failures: Failures,
        lost: Lost,
        sources: Sequence[Source] = (),
        launches: Callable[[], int] = lambda: 0,
        waited: Callable[[], float] | None = None,
        across: int | None = None,
        comes_within: float | None = None,
        may_be_unreached: bool = False,
    ) -> None:
        self._rank = rank
        self._failures = failures
        self._lost = lost
        self._sources = sources
        self._launches = launches
        self._poll_seconds = poll_seconds(size)
        self._next_poll = 0.0
        self._ends = _Ends(rank, size)
        self._register = _Register(store, rank)
        called = [each for each in dict.fromkeys([(rank + 1) % size, across]) if each is not None]
        self._calls = _Calls(self._register, rank, called, self._ends, self._poll_seconds)
        self.closed: set[int] = set()
        """Ranks whose connections have ended without a goodbye."""
        self._closed = threading.Event()
        self._orderly = False
        self._pulse: _Pulse | None = None
        leave_to_parent(self)
        if waited is not None:
            self._calls.next.expect(comes_within, may_be_unreached)
            self._pulse = _Pulse(rank, self._ends, self._poll_seconds, waited)
        self.thread = BackgroundThread(
            f"gradwire liveness {rank}",
            self._run,
            without="ranks that are lost show by time-outs alone",
            on_failure=lambda error: self._ends.close(),
            end=self._ends.wake,
        )
        self.thread.start()

    def close(self, *, orderly: bool = True) -> None:
        """Leaves the ring.

        Args:
            orderly: Nothing is under way; else the other ranks hear that this one is gone.
        """
        if self._closed.is_set():
            return
        self._orderly = orderly
        self._closed.set()
        if self._pulse is not None:
            self._pulse.end()
        self._ends.wake()
        if self.thread is not threading.current_thread():
            self.thread.join(2 * POLL_SECONDS)

    def leave_to_parent(self) -> None:
        """Closes a forked child's copies: else nobody would hear of the end of the parent while the child lives."""
        self._ends.close()

    def poll_closed(self) -> None:
        """Adds to `closed`, and waits for nothing. The ring's thread alone, once `lost` has been called."""
        assert self._ends.selector is not None
        for key, _ in self._ends.selector.select(0):
            connection = key.fileobj
            if not isinstance(connection, socket.socket) or connection not in self._ends.peers:
                continue
            peer = self._ends.peers[connection]
            try:
                heard = connection.recv(1 << 16)
            except OSError as error:
                log.debug("a neighbour of rank %d is gone: %s", self._rank, error)
                heard = b""
            peer.heard += heard
            try:
                stays = bool(heard) and self._understand(connection, peer)
            except PeerError as error:
                log.debug("rank %d has heard of it already: %s", self._rank, error)
                peer.heard, stays = b"", True
            if not stays:
                self._ends.hang_up(connection)
                if peer.known and peer.rank not in self._register.left:
                    self.closed.add(_sure(peer.rank))

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._ends.selector = selector
            try:
                self._ends.listen()
                try:
                    self._register.come(self._ends.listener.getsockname()[1], self._ends.token)
                    while not self._closed.is_set():
                        self._calls.go_on()
                        self._look(selector)
                except Exception as error:  # noqa: BLE001 - also an error of the device: the other ranks must hear of it
                    if not self._closed.is_set():
                        try:
                            self._pass_on(error)
                        finally:  # or this rank's own callers would wait on
                            self._lost(error)
                if self._orderly:
                    self._say_goodbye()
            finally:
                if self._pulse is not None:
                    self._pulse.end()
                with self._ends.telling:
                    self._ends.close()

    def _listen(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Takes in what has come, and waits for it at most so long. Raises a PeerError where a rank is gone."""
        ready = [key.fileobj for key, _ in selector.select(seconds)]
        for found in ready:
            if isinstance(found, socket.socket) and found in self._ends.peers:
                self._hear(found)
        if self._ends.listener in ready:  # after reading: who has identified itself must not be closed as surplus
            self._ends.accept()
        # A neighbour whose proof is on its way goes last: its thread may be asking the store, or calling somebody else.
        pending = [(one, peer) for one, peer in self._ends.peers.items() if peer.rank is None]
        pending.sort(key=lambda each: bool(each[1].hello))
        for each in to_close({one: peer.since for one, peer in pending}):
            self._ends.hang_up(each)

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Raises a PeerError where a rank is gone."""
        self._listen(selector, self._calls.pause_seconds)
        if self._closed.is_set():
            return
        self._calls.look_for_next()
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + self._poll_seconds
            for source in (self._failures.poll, *self._sources):
                if (failure := source()) is not None:
                    raise PeerFailureError(replace(failure, ranks=()))  # whom, they have been told who can tell
            if self._pulse is not None:
                self._pulse.speak_if_failed()
                self._listen(selector, 0)  # what came while the store was asked
                self._pulse.miss_silent()
        if (known := self._failures.first) is not None:  # heard of by another thread first
            raise PeerFailureError(replace(known, ranks=()))
        self._register.miss_who_left(self._launches())

    def _hear(self, connection: socket.socket) -> None:
        peer = self._ends.peers[connection]
        ended = "the process of rank {} has ended"
        try:
            heard = connection.recv(4096)
        except OSError as error:
            heard, ended = b"", f"rank {{}} does not answer any more ({error})"
        peer.heard += heard
        peer.last = time.monotonic()
        if not heard or not self._understand(connection, peer):
            self._ends.hang_up(connection)
            if not heard and peer.known:
                self._miss(_sure(peer.rank), ended)

    def _understand(self, connection: socket.socket, peer: _Peer) -> bool:
        """Takes in what has arrived; whether the connection stays.

        Raises:
            PeerError: The rank at the other end has given up.
        """
        if not peer.known:
            if not self._ends.meet(connection, peer):
                log.debug("rank %d and a client that is no rank have met", self._rank)
                return False
            if not peer.known:
                return True
            if peer.dialled:
                self._calls.answered(_sure(peer.rank))
        peer.heard = peer.heard.lstrip(HERE)
        kind, said = peer.heard[:1], peer.heard[1:]
        if kind == GOODBYE and len(said) >= 8:
            self._register.left[_sure(peer.rank)] = int.from_bytes(said[:8], "big")
            return False
        if kind == LOST and len(said) >= 4 and len(said) >= 4 + int.from_bytes(said[:4], "big"):
            try:
                failure = PeerFailure.unpacked(said[4 : 4 + int.from_bytes(said[:4], "big")])
            except MessageError as error:
                log.debug("rank %d hangs up on rank %s, which says what no rank says: %s", self._rank, peer.rank, error)
                return False
            raise PeerFailureError(failure)
        return not kind or (kind in (GOODBYE, LOST) and len(said) <= 4 + LONGEST_FAILURE_NBYTES)

    def _miss(self, rank: int, ended: str) -> None:
        """Raises a PeerError, unless a rank whose connection has ended has said goodbye, here or in the store.

        A connection may break though both its ends live: who is called and listens is not missing.
        """
        if rank in self._register.left:
            return
        try:
            if self._register.has_left(rank):
                return
            self.closed.add(rank)
            for seconds in CLOSING_POLLS:
                time.sleep(seconds)
                if self._register.state_of(rank) != LISTENS:
                    raise _failure_error(ended.format(rank), HAS_ENDED, rank)
            raise _failure_error(f"lost the connection to rank {rank}, whose process is still running", BROKEN)
        except PeerError:
            raise
        except RuntimeError as error:
            log.debug("the store cannot say whether rank %d has left in order: %s", rank, error)
        raise _failure_error(ended.format(rank), HAS_ENDED, rank)

    def _pass_on(self, error: Exception) -> None:
        """Tells the neighbours before this rank asks who is left: the store may be gone."""
        said = PeerFailure.of(error).packed(self._rank)
        for connection, peer in self._ends.peers.items():
            if peer.known:
                self._ends.tell(connection, LOST + len(said).to_bytes(4, "big") + said)

    def _say_goodbye(self) -> None:
        """Also to a rank whose connection waits to be accepted, and through the store to one that comes later."""
        if (known := self._failures.first) is not None and known.source != OVER:
            log.debug("rank %d leaves without a goodbye: all have been told that %s", self._rank, known.reason)
            return
        launches = self._launches()
        goodbye = GOODBYE + launches.to_bytes(8, "big")
        self._register.leave(launches)
        self._ends.accept(CLOSING_CALLERS)
        patience = time.monotonic() + CLOSING_SECONDS
        for connection, peer in self._ends.peers.items():
            if peer.known:
                self._ends.tell(connection, goodbye)
            elif not peer.dialled:
                connection.settimeout(max(LEAST_CLOSING_SECONDS, patience - time.monotonic()))
                try:  # what was not read when a connection is closed takes along what was sent
                    peer.heard += connection.recv(4096)
                except OSError as error:
                    log.debug("who has just called rank %d says nothing: %s", self._rank, error)
                if peer.reply:  # it has been answered, and hears the goodbye behind that
                    self._ends.tell(connection, goodbye)
                elif len(peer.heard) >= _HELLO_NBYTES and peer.heard.startswith(GREETING):
                    self._ends.tell(connection, (self._ends.reply_to(peer) or b"") + goodbye)


class Deadline:
    """Says when work on a device has been under way for too long. Any thread.

    Args:
        timeout: For each moment that is watched.
        device: The CUDA device; None where the moments need none.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self._seconds = timeout.total_seconds()
        self._device = device
        self._marks: deque[tuple[float, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()

    def watch(self, has_passed: Callable[[], bool]) -> None:
        """Expects the device to pass a moment within the time-out.

        Args:
            has_passed: Says whether it has: `query` of an event, `is_completed` of a collective.
        """
        with self._lock:
            self._drop_passed()
            self._marks.append((time.monotonic(), has_passed))

    @property
    def is_under_way(self) -> bool:
        """Whether the device has not passed all moments yet."""
        with self._lock:
            self._drop_passed()
            return bool(self._marks)

    def overdue(self) -> PeerFailure | None:
        """Why to give up; None while there is time.

        The device is asked only when there is no time left: the question, from another thread, would break a capture
        of a CUDA graph that the user makes between two steps.
        """
        with self._lock:
            if not self._is_late():
                return None
            with self._on_device():
                self._drop_passed()
            if not self._is_late():
                return None
        reason = f"no progress for {self._seconds:g} s: a rank is late, or has issued other collectives"
        return PeerFailure(reason, OVERDUE)

    def _is_late(self) -> bool:
        return bool(self._marks) and time.monotonic() - self._marks[0][0] >= self._seconds

    def _drop_passed(self) -> None:
        while self._marks and self._marks[0][1]():
            self._marks.popleft()

    def _on_device(self) -> AbstractContextManager[object]:
        """A thread that has set no device would make a context of its own on the first one."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


def _failure_error(reason: str, source: str, *ranks: int) -> PeerFailureError:
    return PeerFailureError(PeerFailure(reason, source, ranks))


def _claimed(peer: _Peer) -> int:
    """The rank that a caller says that it is."""
    return int.from_bytes(peer.hello[len(GREETING) :][:4], "big")


def _sure(rank: int | None) -> int:
    assert rank is not None
    return rank
