"""TCP sockets that gloo has opened, found in this process: ended when a job fails, closed in forked children."""

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
    """A TCP connection of this process.

    Attributes:
        descriptor: Its file descriptor.
        inode: Its socket's number, which no later socket has under the same descriptor.
    """

    descriptor: int
    inode: int

    def leave_to_parent(self) -> None:
        """Closes its copy, if it is still there (in a forked child)."""
        with suppress(OSError):  # closed before the fork
            if os.fstat(self.descriptor).st_ino == self.inode:
                replace_descriptor(self.descriptor)

    def shut_down(self) -> None:
        """Ends it, for both ends, if it is still there; the descriptor stays its owner's."""
        try:
            copy = os.dup(self.descriptor)
        except OSError:  # closed by its owner
            return
        if os.fstat(copy).st_ino != self.inode:  # something else by now
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection, suppress(OSError):  # its other end has been faster
            connection.shutdown(socket.SHUT_RDWR)


class GlooSockets:
    """The sockets of groups of gloo's.

    Attributes:
        connections: That they have.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._listening: list[Connection] = []
        leave_to_parent(self)

    def opened_by(self, make: Callable[[], Result]) -> Result:
        """Takes in what is opened while a group is made, and returns that."""
        before, listening = set(connections()), set(listeners())
        made = make()
        self.connections += [connection for connection in connections() if connection not in before]
        self._listening += [each for each in listeners() if each not in listening]
        return made

    def shut_down(self) -> None:
        """Ends the connections: what is under way on them fails at once, here and at their other ends. Any thread.

        Gloo itself cannot be told to give up (`abort` does nothing): a collective waits until its time-out, and so does
        the destructor of its group, as long as the process at the other end lives. So the sockets are shut down.
        """
        for connection in list(self.connections):
            connection.shut_down()

    def leave_to_parent(self) -> None:
        """Closes a forked child's copies of gloo's sockets, which would hide the end of the parent from its peers."""
        for connection in (*self.connections, *self._listening):
            connection.leave_to_parent()


def connections() -> Iterator[Connection]:
    """The TCP connections of this process that have a time-out for sending, as all of gloo's have; on Linux."""
    return _sockets(lambda each: any(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)))


def listeners() -> Iterator[Connection]:
    """The sockets at which this process listens for TCP connections; on Linux."""
    return _sockets(lambda each: bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _sockets(wanted: Callable[[socket.socket], bool]) -> Iterator[Connection]:
    """Those of TCP that are wanted."""
    for descriptor, connection in tcp_sockets():
        if wanted(connection):
            yield Connection(descriptor, os.fstat(connection.fileno()).st_ino)
