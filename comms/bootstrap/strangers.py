"""Whoever calls a port of this process, until he has said who he is: of all at once, few, and not for long.

Anybody on the job's network can connect and say nothing, or a byte now and then, or come ten thousand times. None of
that may keep those waiting who belong here, nor take the descriptors that the job needs for its own files.
"""

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("gradwire")

MOST_STRANGERS = 256
"""Who have not said who they are. Beyond that the one who has been silent for longest is turned away. Of 1,024
descriptors, what Linux gives to a process, it leaves most; a rank that belongs here says its name with its call, and is
heard before the next one is let in."""

STRANGER_SECONDS = 20.0
"""Seconds for saying it: a few round trips, lost packets, and a process that waits for the GIL between the two."""

LEAST_SECONDS = 0.25
"""Seconds that each caller has at least to say it, one that is greeted first above all: while so many have come within
them, the next ones wait in the kernel's queue. A thousand ranks may call one at once, where another one has failed."""

FULL_NAP_SECONDS = 0.05
"""Where this process has no descriptor left for a caller, whose call stays: it must not be looked for all the time."""

_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_CLOSED = {errno.EBADF, errno.EINVAL}


def accept(listener: socket.socket) -> socket.socket | None:
    """The next caller; None where he has gone again, or there is no descriptor left for him.

    Args:
        listener: On which somebody waits.

    Raises:
        OSError: It is closed.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _CLOSED:
            raise
        log.debug("a caller was not let in: %s", error)
        if error.errno in _FULL:
            time.sleep(FULL_NAP_SECONDS)
        return None


def to_turn_away(since: Mapping[socket.socket, float]) -> list[socket.socket]:
    """Those who have not said who they are and are silent for too long, or too many: the oldest.

    Args:
        since: When each has called, in monotonic seconds; the oldest first.
    """
    latest = time.monotonic() - STRANGER_SECONDS
    surplus = len(since) - MOST_STRANGERS
    found = [each for index, (each, called) in enumerate(since.items()) if index < surplus or called <= latest]
    if found:
        log.debug("%d callers who have not said who they are are turned away", len(found))
    return found


class Strangers:
    """Lets callers in and hears of each what he says first; who is silent keeps nobody else waiting. One thread.

    Args:
        listener: Is made non-blocking; closed by whoever has made it, after this.
        lacks: How many bytes are missing behind those that have been heard; 0: he has said all. No more than that is
            read of a connection.
        greeting: Makes what each caller is told at once, some tens of bytes; None tells them nothing.
    """

    def __init__(
        self, listener: socket.socket, lacks: Callable[[bytes], int], greeting: Callable[[], bytes] | None = None
    ) -> None:
        listener.setblocking(False)  # who has called may have gone before he is let in
        self._listener = listener
        self._lacks = lacks
        self._greeting = greeting
        self._greeted: dict[socket.socket, bytes] = {}
        self._lets_in = True
        self._heard: dict[socket.socket, tuple[float, bytes]] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def next(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Connections of those who have said all, or have ended their sentence before, and what they said.

        What they were greeted with stands before it.

        They are the caller's from now on, and blocking.

        Args:
            seconds: To wait at most until somebody says something.

        Raises:
            OSError: The listener is closed.
        """
        seconds = min(seconds, self._let_in_or_wait() or seconds)
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        callers = [each for each in ready if isinstance(each, socket.socket) and each is not self._listener]
        through = [(each, self._leave(each)) for each in callers if self._hear(each)]
        if self._listener in ready and (caller := accept(self._listener)) is not None:
            caller.setblocking(False)
            self._heard[caller] = time.monotonic(), b""
            self._selector.register(caller, selectors.EVENT_READ)
            self._greet(caller)
        for each in to_turn_away({one: called for one, (called, _) in self._heard.items()}):
            self._leave(each)
            each.close()
        return through

    def close(self) -> None:
        """Turns away all who are left."""
        for each in list(self._heard):
            self._leave(each)
            each.close()
        self._selector.close()

    def _let_in_or_wait(self) -> float:
        """Looks for new callers only while there is room; else the seconds until there will be."""
        seconds = 0.0
        if len(self._heard) >= MOST_STRANGERS:
            oldest, _ = next(iter(self._heard.values()))
            seconds = max(oldest + LEAST_SECONDS - time.monotonic(), 0.0)
        if self._lets_in and seconds:
            self._selector.unregister(self._listener)
        elif not self._lets_in and not seconds:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._lets_in = not seconds
        return seconds

    def _greet(self, caller: socket.socket) -> None:
        self._greeted[caller] = b"" if self._greeting is None else self._greeting()
        try:
            caller.send(self._greeted[caller])  # into an empty buffer, which takes it whole
        except OSError as error:  # shows when it is read
            log.debug("a caller has gone again: %s", error)

    def _hear(self, connection: socket.socket) -> bool:
        """Whether there is nothing more to be heard of him."""
        since, heard = self._heard[connection]
        try:
            more = connection.recv(self._lacks(heard))
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("a caller has gone again: %s", error)
            more = b""
        self._heard[connection] = since, heard + more
        return not more or not self._lacks(heard + more)

    def _leave(self, connection: socket.socket) -> bytes:
        self._selector.unregister(connection)
        connection.setblocking(True)
        return self._greeted.pop(connection) + self._heard.pop(connection)[1]
