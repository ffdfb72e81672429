"""What one TCP connection reaches, where that is less than the link: clouds and a core's TCP stack both limit a flow.

A ring of all ranks crosses from node to node on one connection, parallel rings on several; a limit on each connection
tells them apart, as a limit on the link cannot.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

_SO_MAX_PACING_RATE = 47
"""Source: Linux include/uapi/asm-generic/socket.h; TCP paces by itself where no fq queue does: tcp(7), tc-fq(8)."""


def limit_streams(bytes_per_second: float) -> int:
    """Limits what each of this process's TCP connections to another node sends; those inside the node stay as they are.

    Args:
        bytes_per_second: Of payload and headers, for each connection and direction; this side sends no faster.

    Returns:
        Connections limited.
    """
    limited = 0
    for connection in connected_sockets():
        with connection:
            if connection.getpeername()[0] != connection.getsockname()[0]:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(bytes_per_second))
                limited += 1
    return limited


def connected_sockets() -> Iterator[socket.socket]:
    """This process's connected TCP sockets, as duplicates that the caller closes."""
    for link in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # closed meanwhile: the folder's own descriptor, or by another thread
            continue
        if (
            found.type == socket.SOCK_STREAM
            and found.family in (socket.AF_INET, socket.AF_INET6)
            and _is_connected(found)
        ):
            yield found
        else:
            found.close()


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True
