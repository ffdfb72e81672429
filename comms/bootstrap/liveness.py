"""Detects within a second that the process of another rank has exited, when collectives themselves do not report it.

A NCCL collective waits on the device for a rank that is gone, and no error is raised. So the ranks form a ring: each
keeps a connection to the rank after it and one to the rank before it. The kernel closes the connections of a process
that exits, however it exits; a host that disappears shows by TCP's keep-alive. A slow process keeps its connections, so
there is no false alarm. What two neighbours detect is forwarded along the ring, and sent to all through the store.

There is a ring on CUDA (`_ring` of communicator.py) and in each generation of elastic training
(elastic/membership.py). A job on CPUs that is not elastic has none: there an exit shows in the collectives themselves,
see failures.py. An exception in the ring's thread is a failure of the group, too: it is forwarded without a rank, so
nobody takes this one for dead. Only if even forwarding fails do the neighbours see nothing but closed connections and a
closed port, which they take for this rank's exit.

A rank that shuts down in order sends how many launches it has started: it counts as failed only for a rank that starts
another one.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.failure_reporter import POLL_SECONDS, poll_seconds
from gradwire.comms.bootstrap.failures import (
    BROKEN,
    ENDED,
    LONGEST_FAILURE_NBYTES,
    OVER,
    SILENT,
    GroupFailures,
    PeerFailure,
    PeerFailureError,
    Source,
)
from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.comms.bootstrap.kernel import LISTENS
from gradwire.comms.bootstrap.pending_connections import to_close
from gradwire.comms.bootstrap.ring_connections import (
    GREETING,
    HELLO_NBYTES,
    Dialer,
    MemberRecords,
    PeerConnection,
    RingConnections,
    failure_error,
)
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.messages import MessageError
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

CLOSING_SECONDS, LEAST_CLOSING_SECONDS = 0.2, 0.001
"""Time, while this rank shuts down, for all unidentified connections together to identify themselves, and for each of
them if one uses all of it."""

CLOSING_ACCEPTED = 16
"""Queued connections accepted then: the two neighbours, and some others."""

CLOSING_POLLS = (0.0, 0.02, 0.08)
"""Seconds before each check whether a process whose connection has ended still listens: the kernel of an exiting
process closes its sockets one after the other."""

SHUTDOWN, FAILURE, ALIVE = b".", b"!", b"~"
"""First byte of a message. 8 bytes with the number of launches follow `SHUTDOWN`, 4 bytes of length and a packed
failure follow `FAILURE`, nothing follows `ALIVE`, the heartbeat."""

FROZEN_SECONDS = 10.0
"""Silence after which a connected neighbour is reported while this rank waits: its process is stopped. Much longer than
a thread waits for the GIL."""

OnFailure = Callable[[Exception], None]
"""Called once, from the ring's thread: with a `PeerFailureError`, or with what a source has raised."""


class Heartbeat:
    """Sends heartbeats to the neighbours, and reports a neighbour that sends none: its process may be stopped.

    A thread of its own sends them, so that they go on while the ring's thread waits for the store. If that thread wakes
    more than one heartbeat late, this process or its machine was stopped, and the neighbours perhaps with it: the
    silence of each is then counted from now on.

    Thread safety: `end` may be called from any thread, all other methods from the ring's thread.

    Args:
        rank: This rank.
        connections: Connections of this rank.
        seconds: Seconds between two heartbeats.
        waited: Returns for how many seconds this rank has been waiting for others; a silent neighbour is reported only
            while it waits.
    """

    def __init__(self, rank: int, connections: RingConnections, seconds: float, waited: Callable[[], float]) -> None:
        self._connections = connections
        self._seconds = seconds
        self._waited = waited
        self._ended = threading.Event()
        self._resumed = time.monotonic()
        # Whether the thread has ended by an exception; then the ring's thread sends the heartbeats.
        self._failed = False
        BackgroundThread(
            f"gradwire heartbeat {rank}",
            self._run,
            without="the thread of the liveness ring sends the heartbeats of this process instead, if more rarely",
            on_failure=self._fail,
            awaited=False,
        ).start()

    def end(self) -> None:
        """Stops sending; any thread may call this."""
        self._ended.set()

    def raise_if_silent(self) -> None:
        """Raises `PeerError` for a neighbour that has been silent too long while this rank waits for others.

        Both silence and wait must exceed `FROZEN_SECONDS` and three heartbeats.
        """
        waited, patience = self._waited(), max(FROZEN_SECONDS, 3 * self._seconds)
        for peer in self._connections.peers.values():
            silent = time.monotonic() - max(peer.last, self._resumed)
            if peer.known and waited > patience and silent > patience:
                rank = _sure(peer.rank)
                reason = f"no heartbeat from rank {rank} for {silent:.0f} s: its process is stopped"
                raise failure_error(reason, SILENT, rank)

    def send_if_failed(self) -> None:
        """Sends a heartbeat from the ring's thread if the heartbeat thread has failed.

        Raises nothing: an error would end the ring, which also works without heartbeats of this rank.
        """
        if not self._failed:
            return
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - whatever it is; the next poll tries again
            log.warning("heartbeats cannot be sent; after %g s neighbours may report a stop: %r", FROZEN_SECONDS, error)

    def _fail(self, error: BaseException) -> None:
        self._failed = True

    def _run(self) -> None:
        """Sends heartbeats until `end`; the heartbeat thread."""
        before = time.monotonic()
        while not self._ended.wait(self._seconds):
            now = time.monotonic()
            if now - before > 2 * self._seconds:
                self._resumed = now
            before = now
            self._send()

    def _send(self) -> None:
        for connection, peer in list(self._connections.peers.items()):
            if peer.known:
                self._connections.send(connection, ALIVE)


class LivenessRing:
    """One rank's end of the ring: a thread that watches both neighbours and reports the first failure.

    Thread safety: `close` may be called from any thread. All else happens in the ring's thread, which no neighbour can
    block: connecting does not block, sending is bounded by `SEND_SECONDS`. It waits for the store alone.

    Args:
        store: Store shared by all ranks, with a prefix of its own, whose waits block no other user.
        rank: This rank.
        size: Number of ranks.
        failures: `GroupFailures` that this rank knows of; the ring ends with the first one.
        on_failure: Called once, when a failure ends the ring, after the neighbours were told.
        sources: Further sources, polled every `poll_seconds` (a second, up to 2048 ranks) by the ring's thread only.
        launches: Returns how many launches this rank has started; all ranks start the same ones.
        waited: Returns for how many seconds this rank has been waiting for others. Enables heartbeats, by which a
            stopped process is detected. None leaves those to timeouts.
        across: Rank on another host to connect to as well, so that a host that is lost as a whole is detected. None for
            no such rank.
        join_seconds: Seconds after which a next rank that has not joined, or is unreachable, ends the ring, with no
            rank named as failed. None leaves that to timeouts.
        may_be_unreached: A next rank that has joined and is unreachable is left to timeouts all the same.

    Attributes:
        closed: Ranks whose connections have ended without a shutdown message.
        thread: The ring's thread.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        failures: GroupFailures,
        on_failure: OnFailure,
        sources: Sequence[Source] = (),
        launches: Callable[[], int] = lambda: 0,
        waited: Callable[[], float] | None = None,
        across: int | None = None,
        join_seconds: float | None = None,
        may_be_unreached: bool = False,
    ) -> None:
        self._rank = rank
        self._failures = failures
        self._on_failure = on_failure
        self._sources = sources
        self._launches = launches
        self._poll_seconds = poll_seconds(size)
        self._next_poll = 0.0
        # Connections: from the rank before, and to the next rank and one on another host.
        self._connections = RingConnections(rank, size)
        self._records = MemberRecords(store, rank)
        targets = [each for each in dict.fromkeys([(rank + 1) % size, across]) if each is not None]
        self._dialer = Dialer(self._records, rank, targets, self._connections, self._poll_seconds)
        # Life of the ring, and its threads.
        self.closed: set[int] = set()
        self._closed = threading.Event()
        self._orderly = False
        self._heartbeat: Heartbeat | None = None
        leave_to_parent(self)
        if waited is not None:
            self._dialer.next.expect(join_seconds, may_be_unreached)
            self._heartbeat = Heartbeat(rank, self._connections, self._poll_seconds, waited)
        self.thread = BackgroundThread(
            f"gradwire liveness {rank}",
            self._run,
            without="ranks that fail are detected only by timeouts",
            on_failure=self._fail,
            end=self._stop,
        )
        self.thread.start()

    def close(self, *, orderly: bool = True) -> None:
        """Leaves the ring: ends its thread and the heartbeats, and waits for up to 2 s until the thread has ended.

        The ring's thread does not wait for itself. A second call does nothing.

        Args:
            orderly: No launch is in flight, so the neighbours are sent a shutdown message. Otherwise they see this rank
                as gone.
        """
        if self._closed.is_set():
            return
        self._orderly = orderly
        if self._heartbeat is not None:
            self._heartbeat.end()
        self._stop()
        if self.thread is not threading.current_thread():
            self.thread.join(2 * POLL_SECONDS)

    def _stop(self) -> None:
        """Asks the ring's thread to end soon: by `close`, or at exit, when the neighbours see this rank as gone."""
        self._closed.set()
        self._connections.wake()

    def leave_to_parent(self) -> None:
        """Closes a forked child's copies of the ring's sockets, without sending anything.

        While the child had them, no neighbour would see the parent's connections end when the parent exits.
        """
        self._connections.close_in_child()

    def poll_closed(self) -> None:
        """Adds ranks whose connections have ended to `closed`, without waiting for any.

        Called only from the ring's thread, after `on_failure` was called: the ring itself no longer reads then.
        """
        assert self._connections.selector is not None
        for key, _ in self._connections.selector.select(0):
            connection = key.fileobj
            if not isinstance(connection, socket.socket) or connection not in self._connections.peers:
                continue
            peer = self._connections.peers[connection]
            if peer.connecting:
                continue
            try:
                received = connection.recv(1 << 16)
            except OSError as error:
                log.debug("a neighbour of rank %d is gone: %s", self._rank, error)
                received = b""
            peer.received += received
            try:
                stays = bool(received) and self._handle(connection, peer)
            except PeerError as error:
                # A failure that a neighbour forwards: this rank has reported one already.
                log.debug("rank %d knows of it already: %s", self._rank, error)
                peer.received, stays = b"", True
            if not stays:
                self._connections.hang_up(connection)
                if peer.known and peer.rank not in self._records.left:
                    self.closed.add(_sure(peer.rank))

    def _fail(self, error: BaseException) -> None:
        """Stops the heartbeats and closes all connections, in case the ring's thread failed before it did so."""
        if self._heartbeat is not None:
            self._heartbeat.end()
        self._connections.close()

    def _run(self) -> None:
        """Runs the ring until it is closed or fails; the ring's thread.

        A failure is forwarded to the neighbours and passed to `on_failure`. At the end the shutdown message is sent, if
        `close` was called as orderly, and all connections are closed.
        """
        with selectors.DefaultSelector() as selector:
            self._connections.selector = selector
            try:
                self._connections.listen()
                try:
                    self._records.publish(self._connections.listener.getsockname()[1], self._connections.token)
                    while not self._closed.is_set():
                        self._dialer.advance()
                        self._poll(selector)
                # Also an error of the device: the other ranks must learn of it.
                except Exception as error:  # noqa: BLE001
                    if not self._closed.is_set():
                        try:
                            self._forward(error)
                        finally:
                            # Always called: this rank's own callers wait for it.
                            self._on_failure(error)
                if self._orderly:
                    self._send_shutdown()
            finally:
                if self._heartbeat is not None:
                    self._heartbeat.end()
                self._connections.close()

    def _listen(self, selector: selectors.BaseSelector, seconds: float) -> None:
        """Reads and completes connections that are ready, accepts new ones, and closes unidentified ones.

        An accepted connection that has not proved a rank is closed `PENDING_SECONDS` after it was accepted, or earlier
        if there are more than `MOST_PENDING` of them: first those that have sent no greeting, the oldest first.

        Args:
            selector: Watches the ring's sockets.
            seconds: Longest wait for one to be ready.

        Raises:
            PeerError: A rank has failed.
        """
        ready = [key.fileobj for key, _ in selector.select(seconds)]
        for found in ready:
            if isinstance(found, socket.socket) and (peer := self._connections.peers.get(found)) is not None:
                if peer.connecting:
                    self._connections.finish_connecting(found, peer)
                else:
                    self._receive(found, peer)
        # Accept after reading: a client that has identified itself must not be closed as surplus.
        if self._connections.listener in ready:
            self._connections.accept()
        # A neighbour whose proof is on its way is closed last: its thread may be waiting for the store.
        pending = [(one, peer) for one, peer in self._connections.peers.items() if peer.rank is None]
        pending.sort(key=lambda each: bool(each[1].hello))
        for each in to_close({one: peer.since for one, peer in pending}):
            self._connections.hang_up(each)

    def _poll(self, selector: selectors.BaseSelector) -> None:
        """Handles what arrives until the next check is due, then checks everything once.

        Raises:
            PeerError: A rank has failed.
        """
        self._listen(selector, self._dialer.pause_seconds)
        if self._closed.is_set():
            return
        self._dialer.check_next()
        # Once per `poll_seconds`: the abort signal in the store, further sources, and silent neighbours.
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + self._poll_seconds
            for source in (self._failures.poll, *self._sources):
                if (failure := source()) is not None:
                    # Without ranks: whoever reported the failure has notified the ranks of them.
                    raise PeerFailureError(replace(failure, ranks=()))
            if self._heartbeat is not None:
                self._heartbeat.send_if_failed()
                # Read first what arrived during the store requests.
                self._listen(selector, 0)
                self._heartbeat.raise_if_silent()
        # Another thread may have reported a failure first.
        if (known := self._failures.first) is not None:
            raise PeerFailureError(replace(known, ranks=()))
        self._records.raise_if_peer_left(self._launches())

    def _receive(self, connection: socket.socket, peer: PeerConnection) -> None:
        """Reads a connection that is readable, handles what has arrived, and closes it if it has ended or is no rank's.

        Raises:
            PeerError: The rank at the other end has failed, or has reported a failure.
        """
        ended = "the process of rank {} has ended"
        try:
            received = connection.recv(4096)
        except OSError as error:
            received, ended = b"", f"rank {{}} does not answer any more ({error})"
        peer.received += received
        peer.last = time.monotonic()
        if not received or not self._handle(connection, peer):
            self._connections.hang_up(connection)
            if not received and peer.known:
                self._report_closed(_sure(peer.rank), ended)

    def _handle(self, connection: socket.socket, peer: PeerConnection) -> bool:
        """Handles the bytes in `peer.received` and returns whether the connection stays open.

        Raises:
            PeerError: The rank at the other end has reported a failure.
        """
        if not peer.known:
            if not self._connections.handshake(connection, peer):
                log.debug("rank %d closes a connection that is no rank's", self._rank)
                return False
            if not peer.known:
                return True
            if peer.dialled:
                self._dialer.answered(_sure(peer.rank))
        peer.received = peer.received.lstrip(ALIVE)
        kind, body = peer.received[:1], peer.received[1:]
        if kind == SHUTDOWN and len(body) >= 8:
            self._records.left[_sure(peer.rank)] = int.from_bytes(body[:8], "big")
            return False
        if kind == FAILURE and len(body) >= 4 and len(body) >= 4 + int.from_bytes(body[:4], "big"):
            try:
                failure = PeerFailure.unpacked(body[4 : 4 + int.from_bytes(body[:4], "big")])
            except MessageError as error:
                log.debug("rank %d closes the connection to rank %s: %s", self._rank, peer.rank, error)
                return False
            raise PeerFailureError(failure)
        # Incomplete messages wait for more, up to the largest size.
        return not kind or (kind in (SHUTDOWN, FAILURE) and len(body) <= 4 + LONGEST_FAILURE_NBYTES)

    def _report_closed(self, rank: int, ended: str) -> None:
        """Reports a rank whose connection has ended, unless it has shut down in order.

        A connection may break though both processes live: a process that still listens has not exited.

        Args:
            rank: Rank at the other end.
            ended: Message, with `{}` for the rank.

        Raises:
            PeerError: The rank has failed.
        """
        if rank in self._records.left:
            return
        try:
            if self._records.has_left(rank):
                return
            self.closed.add(rank)
            for seconds in CLOSING_POLLS:
                time.sleep(seconds)
                if self._records.state_of(rank) != LISTENS:
                    raise failure_error(ended.format(rank), ENDED, rank)
            raise failure_error(f"lost the connection to rank {rank}, whose process is still running", BROKEN)
        except PeerError:
            raise
        except RuntimeError as error:
            log.debug("whether rank %d has shut down in order cannot be read from the store: %s", rank, error)
        raise failure_error(ended.format(rank), ENDED, rank)

    def _forward(self, error: Exception) -> None:
        """Forwards a failure to the neighbours, before this rank uses the store: it may be unreachable."""
        packed = PeerFailure.of(error).packed(self._rank)
        for connection, peer in self._connections.peers.items():
            if peer.known:
                self._connections.send(connection, FAILURE + len(packed).to_bytes(4, "big") + packed)

    def _send_shutdown(self) -> None:
        """Sends the shutdown message to the neighbours, and records it in the store for a rank that connects later.

        Connections that still wait to be accepted, or to prove a rank, get it too. Nothing is sent after a failure that
        all know of, unless that is the orderly end of this generation (`over`).
        """
        if (known := self._failures.first) is not None and known.source != OVER:
            log.debug("rank %d sends no shutdown message, as all know of the failure: %s", self._rank, known.reason)
            return
        launches = self._launches()
        shutdown = SHUTDOWN + launches.to_bytes(8, "big")
        self._records.publish_shutdown(launches)
        # A neighbour's connection may still wait in the kernel's queue.
        self._connections.accept(CLOSING_ACCEPTED)
        deadline = time.monotonic() + CLOSING_SECONDS
        for connection, peer in self._connections.peers.items():
            if peer.known:
                self._connections.send(connection, shutdown)
            elif not peer.dialled:
                # Read before closing: unread bytes make the kernel reset the connection, which drops what was sent.
                connection.settimeout(max(LEAST_CLOSING_SECONDS, deadline - time.monotonic()))
                try:
                    peer.received += connection.recv(4096)
                except OSError as error:
                    log.debug("a connection to rank %d sends nothing: %s", self._rank, error)
                if peer.reply:
                    # The other end has its reply already, and reads the message after it.
                    self._connections.send(connection, shutdown)
                elif len(peer.received) >= HELLO_NBYTES and peer.received.startswith(GREETING):
                    self._connections.send(connection, (self._connections.reply_to(peer) or b"") + shutdown)


def _sure(rank: int | None) -> int:
    """Returns the rank of a connection whose handshake is complete, for the type checker."""
    assert rank is not None
    return rank
