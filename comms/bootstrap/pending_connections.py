"""Accepts connections that have not identified themselves yet, bounded in number and in time.

Any host on the job's network can connect and send nothing, send single bytes slowly, or connect ten thousand times.
None of that may delay the ranks of the job, or use up the file descriptors that the process needs.
"""

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("gradwire")

MOST_PENDING = 256
"""Connections that may be unidentified at a time; beyond that the oldest is closed. That leaves most of the 1,024
descriptors of a Linux process. A rank of the job identifies itself as it connects, so it is read before the next
connection is accepted."""

PENDING_SECONDS = 20.0
"""Time to identify: a few round trips, lost packets, and a client whose thread waits for the GIL between the two."""

LEAST_SECONDS = 0.25
"""Time that each connection has at least, even if `MOST_PENDING` are reached; meanwhile new ones wait in the kernel's
queue. After a failure a thousand ranks may connect to one at once, and each waits for the greeting first."""

FULL_NAP_SECONDS = 0.05
"""Pause after the process has run out of descriptors: the connection stays in the kernel's queue, so that the selector
would report it again at once."""

_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_CLOSED = {errno.EBADF, errno.EINVAL}


def accept(listener: socket.socket) -> socket.socket | None:
    """Accepts the next connection, without waiting for one.

    Returns None if none is queued, if the client has disconnected, or, after `FULL_NAP_SECONDS`, if no descriptor or
    memory is left.

    Args:
        listener: Non-blocking listening socket.

    Raises:
        OSError: The listener is closed.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _CLOSED:
            raise
        log.debug("a connection was not accepted: %s", error)
        if error.errno in _FULL:
            time.sleep(FULL_NAP_SECONDS)
        return None


def to_close(since: Mapping[socket.socket, float]) -> list[socket.socket]:
    """Returns the unidentified connections to close: those older than `PENDING_SECONDS`, and the first surplus ones.

    Surplus are the first entries of `since`, as many as it has more than `MOST_PENDING`.

    Args:
        since: Unidentified connection -> when it was accepted, in monotonic seconds; the first to close first.
    """
    latest = time.monotonic() - PENDING_SECONDS
    surplus = len(since) - MOST_PENDING
    found = [each for index, (each, accepted) in enumerate(since.items()) if index < surplus or accepted <= latest]
    if found:
        log.debug("%d connections that have not identified themselves are closed", len(found))
    return found


class PendingConnections:
    """Accepts connections and reads the first message of each, without blocking on any of them.

    Thread safety: all methods must be called from one thread.

    Args:
        listener: Listening socket; made non-blocking. Its owner closes it after this object.
        missing: Given the bytes received, returns how many bytes of the first message are missing; 0 if it is complete.
            No more than that is read from a connection.
        greeting: Makes the bytes (some tens) that each client is sent on connecting; None sends nothing.
    """

    def __init__(
        self, listener: socket.socket, missing: Callable[[bytes], int], greeting: Callable[[], bytes] | None = None
    ) -> None:
        # A client may disconnect between select() and accept(), which would block then.
        listener.setblocking(False)
        self._listener = listener
        self._missing = missing
        self._greeting = greeting
        self._greeted: dict[socket.socket, bytes] = {}
        self._accepts = True
        # Invariant: oldest first. Connection -> when it was accepted, and the bytes received since.
        self._received: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def next(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Waits for data and returns the connections whose first message is complete, or which the client has closed.

        Also accepts at most one new connection and greets it, and closes those that are late or surplus.

        Args:
            seconds: Longest wait; it may return earlier, with no connection.

        Returns:
            Connections, blocking and owned by the caller from now on, each with its greeting followed by the bytes
            received.

        Raises:
            OSError: The listener is closed.
        """
        seconds = min(seconds, self._watch_if_room() or seconds)
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        # Read before accepting: a client that has identified itself must not be closed as surplus.
        readable = [each for each in ready if isinstance(each, socket.socket) and each is not self._listener]
        complete = [(each, self._release(each)) for each in readable if self._receive(each)]
        if self._listener in ready and (connection := accept(self._listener)) is not None:
            connection.setblocking(False)
            self._received[connection] = time.monotonic(), b""
            self._selector.register(connection, selectors.EVENT_READ)
            self._greet(connection)
        for each in to_close({one: accepted for one, (accepted, _) in self._received.items()}):
            self._release(each)
            each.close()
        return complete

    def close(self) -> None:
        """Closes all unidentified connections, and stops watching the listener, which stays open."""
        for each in list(self._received):
            self._release(each)
            each.close()
        self._selector.close()

    def _watch_if_room(self) -> float:
        """Makes the selector watch the listener if another connection can be pending, and not if `MOST_PENDING` are.

        Returns:
            Seconds until the oldest pending connection has had its `LEAST_SECONDS` and may be closed for a new one; 0
            if the listener is watched.
        """
        seconds = 0.0
        if len(self._received) >= MOST_PENDING:
            oldest, _ = next(iter(self._received.values()))
            seconds = max(oldest + LEAST_SECONDS - time.monotonic(), 0.0)
        if self._accepts and seconds:
            self._selector.unregister(self._listener)
        elif not self._accepts and not seconds:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts = not seconds
        return seconds

    def _greet(self, connection: socket.socket) -> None:
        """Sends the greeting; the empty buffer of a new connection takes it whole."""
        self._greeted[connection] = b"" if self._greeting is None else self._greeting()
        try:
            connection.send(self._greeted[connection])
        except OSError as error:
            # The next read of the connection reports this, too.
            log.debug("a client has disconnected: %s", error)

    def _receive(self, connection: socket.socket) -> bool:
        """Reads what has arrived; returns whether nothing more is expected from this connection."""
        accepted, received = self._received[connection]
        try:
            more = connection.recv(self._missing(received))
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("a client has disconnected: %s", error)
            more = b""
        self._received[connection] = accepted, received + more
        return not more or not self._missing(received + more)

    def _release(self, connection: socket.socket) -> bytes:
        """Stops watching a connection, makes it blocking, and returns its greeting and the bytes received."""
        self._selector.unregister(connection)
        connection.setblocking(True)
        return self._greeted.pop(connection) + self._received.pop(connection)[1]
