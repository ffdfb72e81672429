"""Facts from the Linux kernel: whether a process still listens on its port, and counters of own TCP connections.

Only the kernel that a process runs on can say that it has exited. A refused connection says little: the address may be
this host's own (the loopback, docker's bridge, a host name that resolves to 127.0.1.1), or another host's by now, and a
firewall refuses connections as well. For a process on this kernel and network namespace, the kernel lists whether
anything listens on its port. For others nothing is known until they are silent for long, or until their kernel closes a
connection that has been theirs.

Source: struct tcp_info, Linux include/uapi/linux/tcp.h; SO_MAX_PACING_RATE, socket(7), asm-generic/socket.h.
"""

import hashlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

from gradwire.comms.bootstrap.addresses import LOOPBACK, interface_addresses

log = logging.getLogger("gradwire")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""Files that list all TCP sockets of this network namespace. Source: proc_pid_net(5)."""

DESCRIPTORS = Path("/proc/self/fd")
_AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
"""Socket type by which Python keeps the descriptor's blocking mode, despite `setdefaulttimeout`: torch shares it."""

_TCP_INFO = struct.Struct("=2xB21xI72xI16xQ20xI4xI8xQQQ24xI")
"""The fields of `TcpInfo`, in their order; the four times in microseconds."""
_UNKNOWN_TRIP = 2**32 - 1
_SO_MAX_PACING_RATE = 47
_MOST_PACED = 2**32 - 2
"""Bytes per second; one more means no limit."""

LISTENING = "0A"
"""State of a listening socket in these files."""

CONNECT_SECONDS, ALL_CONNECTS_SECONDS = 1.0, 2.0
"""Timeouts of connecting to one address of a process, and to all of them."""

KERNEL_DIGITS = 12
"""Hexadecimal digits of the id of a kernel and network namespace. Collision probability among 10,000 hosts: 2e-7."""

NOTHING_LISTENS, LISTENS, REFUSED, UNKNOWN = "ended", "listens", "refused", "unknown"
"""State of a port, as far as it is known: its own kernel says that nothing listens; something listens; its host refuses
connections, as after an exit or because of a firewall; nothing is known."""


def host_identity(hostname: str | None = None) -> tuple[str, str, str]:
    """Returns the host name (or the one given), the boot id and the number of /dev/shm's device; empty if not known."""
    memory = Path("/dev/shm")
    return (
        hostname or socket.gethostname(),
        BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
        str(memory.stat().st_dev) if memory.exists() else "",
    )


@lru_cache(maxsize=1)
def own_kernel() -> str:
    """Returns an id of this boot of this host and this network namespace; empty if the kernel does not tell."""
    try:
        boot, network = BOOT_ID.read_text().strip(), NETWORK.stat().st_ino
    except OSError as error:
        log.debug("this kernel does not say which it is: %s", error)
        return ""
    # With the host name: a clone of a running machine has the same boot id.
    words = f"{boot} {network} {socket.gethostname()}"
    return hashlib.sha256(words.encode()).hexdigest()[:KERNEL_DIGITS] if boot else ""


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields this process's TCP sockets, connected, listening or neither.

    Yields:
        (Descriptor, duplicate of the socket); the duplicate is closed when the next one is asked for. Nothing if /proc
        does not list this process's descriptors.
    """
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:
        return
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except OSError:
            # Closed meanwhile.
            continue
        try:
            connection = socket.socket(type=_AS_IT_IS, fileno=copy)
        except OSError:
            # The number belongs to another file by now, or to a socket without an address.
            os.close(copy)
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.proto == socket.IPPROTO_TCP:
                yield descriptor, connection


def outside_connections() -> Iterator[tuple[str, str, socket.socket]]:
    """Yields this process's TCP connections whose two ends have different IP addresses, as those to other hosts have.

    A connection between two addresses of this host is among them, too.

    Yields:
        (Own address, peer's address, duplicate of the socket); the duplicate is closed when the next one is asked for.
    """
    for _, connection in tcp_sockets():
        # An OSError means that the socket is not connected.
        with suppress(OSError):
            own, peer = str(connection.getsockname()[0]), str(connection.getpeername()[0])
            if own != peer:
                yield own, peer, connection


class TcpInfo(NamedTuple):
    """Counters of one TCP connection since it was opened; 0 if the kernel is too old for a counter.

    Attributes:
        timeouts: Retransmissions in a row since the last acknowledgement.
        unacknowledged: Segments in flight now.
        retransmitted: Segments sent again.
        acknowledged_nbytes: Payload bytes acknowledged.
        trip_seconds: Shortest round trip; 0 before the first one.
        segments: Segments with data sent, repeated ones included.
        busy_seconds: Time with data that is to be sent or not acknowledged yet, in steps of the kernel's clock
            (milliseconds).
        receiver_seconds: Part of it in which the receiver's window was full.
        sender_seconds: Part of it in which the size of the send buffer was the limit.
        sent_twice: Segments of which the receiver has reported that it got them twice.
        is_whole: Whether the kernel has all counters.
    """

    timeouts: int
    unacknowledged: int
    retransmitted: int
    acknowledged_nbytes: int
    trip_seconds: float
    segments: int
    busy_seconds: float
    receiver_seconds: float
    sender_seconds: float
    sent_twice: int
    is_whole: bool

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """Reads the counters of a connection.

        Args:
            connection: TCP socket.

        Raises:
            OSError: It is no TCP socket, or was closed.
        """
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        whole = len(facts) == _TCP_INFO.size
        found = cls._make((*_TCP_INFO.unpack(facts.ljust(_TCP_INFO.size, b"\0")), whole))
        return found._replace(
            trip_seconds=0.0 if found.trip_seconds == _UNKNOWN_TRIP else found.trip_seconds / 1e6,
            busy_seconds=found.busy_seconds / 1e6,
            receiver_seconds=found.receiver_seconds / 1e6,
            sender_seconds=found.sender_seconds / 1e6,
        )


def pace(connection: socket.socket, bytes_per_second: float) -> None:
    """Limits the send rate of a TCP connection. TCP paces by itself if no fq queue does (tcp(7), tc-fq(8)).

    Args:
        connection: TCP socket.
        bytes_per_second: Rate of payload and headers; at least 1.
    """
    rate = min(max(int(bytes_per_second), 1), _MOST_PACED)
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))


def is_listened_at(port: int) -> bool | None:
    """Returns whether anything in this network namespace listens on a TCP port; None if the kernel does not tell."""
    known = False
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError as error:
            # For example, a kernel without IPv6.
            log.debug("the kernel does not list its sockets: %s", error)
            continue
        known = True
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                return True
    return False if known else None


def listener_state(kernel: str, port: int, addresses: Sequence[str]) -> str:
    """Returns `NOTHING_LISTENS`, `LISTENS`, `REFUSED` or `UNKNOWN`, after `ALL_CONNECTS_SECONDS` at most.

    Args:
        kernel: `own_kernel()` of that process.
        port: Port on which it listens as long as it lives.
        addresses: IP addresses of its host.
    """
    if kernel and kernel == own_kernel():
        listened_at = is_listened_at(port)
        if listened_at is not None:
            return LISTENS if listened_at else NOTHING_LISTENS
    deadline, found = time.monotonic() + ALL_CONNECTS_SECONDS, UNKNOWN
    for address in of_others(addresses):
        seconds = min(CONNECT_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            break
        try:
            socket.create_connection((address, port), seconds).close()
        except OSError as error:
            log.debug("no answer from %s, port %d: %s", address, port, error)
            if isinstance(error, ConnectionRefusedError):
                found = REFUSED
            continue
        return LISTENS
    return found


def of_others(addresses: Sequence[str]) -> list[str]:
    """Returns the addresses that are not this host's own: there, some other process could answer."""
    own = {*interface_addresses(), LOOPBACK}
    return [each for each in addresses if each not in own]


def addresses_to_try(kernel: str, addresses: Sequence[str]) -> list[str]:
    """Returns the addresses to connect to, in order; the loopback first if the process runs on this kernel."""
    if kernel and kernel == own_kernel():
        return [LOOPBACK, *(each for each in addresses if each != LOOPBACK)]
    return of_others(addresses) or list(addresses)


def _forget() -> None:
    """Clears the cache in a forked child, which may move to another network namespace."""
    own_kernel.cache_clear()


os.register_at_fork(after_in_child=_forget)
