"""This module finds the TCP sockets that gloo opens in this process.

Gloo offers no way to abort a collective and none to leave its sockets out of a forked child. `GlooSockets` records the
sockets of a group while it is made, shuts them down when a job fails, and closes their copies in forked children. On
other systems than Linux it finds none.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from gradwire.comms.bootstrap.forks import leave_to_parent, replace_descriptor
from gradwire.comms.bootstrap.kernel import tcp_sockets

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP socket of this process that gloo has opened, connected or listening: to shut it down, or close its copy.

    Gloo does not name its sockets, so they are recorded by number.

    Attributes:
        descriptor: File descriptor.
        inode: Number of the socket in the kernel, by which a later socket with the same descriptor is told from this
            one.
    """

    descriptor: int
    inode: int

    def leave_to_parent(self) -> None:
        """Closes the copy of the socket that a forked child has inherited; called in the child."""
        with suppress(OSError):  # closed before the fork
            if os.fstat(self.descriptor).st_ino == self.inode:
                replace_descriptor(self.descriptor)

    def shut_down(self) -> None:
        """Shuts the connection down for both ends, if it is still open. The descriptor stays open for its owner."""
        try:
            copy = os.dup(self.descriptor)
        except OSError:  # closed by its owner
            return
        if os.fstat(copy).st_ino != self.inode:  # the descriptor has been reused
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection, suppress(OSError):  # the other end was faster
            connection.shutdown(socket.SHUT_RDWR)


class GlooSockets:
    """Records the sockets that a transport's gloo groups open, to shut them down, or close them in a forked child.

    Attributes:
        connections: Connections of the groups to other ranks.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._listening: list[Connection] = []
        leave_to_parent(self)

    def opened_by(self, make: Callable[[], Result]) -> Result:
        """Calls `make`, records the sockets that are opened meanwhile, and returns its result."""
        before, listening = set(connections()), set(listeners())
        made = make()
        self.connections += [connection for connection in connections() if connection not in before]
        self._listening += [each for each in listeners() if each not in listening]
        return made

    def shut_down(self) -> None:
        """Shuts down the connections, so that collectives in flight on them fail at once, here and at the other ends.

        Gloo itself cannot be aborted (`abort` does nothing): a collective waits until its time-out, and so does the
        destructor of its group, while the process at the other end lives.

        Thread safety: may be called from any thread.
        """
        for connection in list(self.connections):
            connection.shut_down()

    def leave_to_parent(self) -> None:
        """Closes a forked child's copies of the sockets: with them open, peers would not notice the parent's exit."""
        for connection in (*self.connections, *self._listening):
            connection.leave_to_parent()


def connections() -> Iterator[Connection]:
    """Yields the TCP connections of this process that may be gloo's; `opened_by` records those that are new.

    Gloo does not say which sockets are its own. All of its connections have a send time-out, and hardly any others have
    one, so every socket with one is yielded. On other systems than Linux none is.
    """
    return _sockets(lambda each: any(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)))


def listeners() -> Iterator[Connection]:
    """Yields the sockets at which this process listens for TCP connections, gloo's and others; on Linux alone."""
    return _sockets(lambda each: bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _sockets(wanted: Callable[[socket.socket], bool]) -> Iterator[Connection]:
    """Yields the TCP sockets of this process for which `wanted` is true."""
    for descriptor, connection in tcp_sockets():
        if wanted(connection):
            yield Connection(descriptor, os.fstat(connection.fileno()).st_ino)
