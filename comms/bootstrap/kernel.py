"""What the kernel says: whether a process has ended, and of this process's TCP connections what they have carried.

Nothing but the kernel that a process runs on counts where a rank is to be given up.

A connection that is refused says little. The address may be the caller's own (the loopback, docker's bridge, a host
name that resolves to 127.0.1.1), or another host's by now, and a firewall that rejects refuses as well. Of a process on
this very kernel, in this network, the kernel lists whether anybody listens at its port. Of others nothing is known
until they say nothing for long, or their kernel closes a connection that has been theirs.

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
"""Every socket of this network namespace. Source: proc_pid_net(5)."""

DESCRIPTORS = Path("/proc/self/fd")
_AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
"""Has Python leave a descriptor's mode alone, whatever `setdefaulttimeout` says: it is shared with torch's."""

_TCP_INFO = struct.Struct("=2xB21xI72xI16xQ20xI4xI8xQQQ24xI")
"""The fields of `TcpInfo`, in their order; the four times in microseconds."""
_UNKNOWN_TRIP = 2**32 - 1
_SO_MAX_PACING_RATE = 47
_MOST_PACED = 2**32 - 2
"""Bytes per second; one more means no limit."""

LISTENING = "0A"
CALL_SECONDS, CALLS_SECONDS = 1.0, 2.0
"""Seconds for one address of a rank, and for all of them."""

KERNEL_DIGITS = 12
"""The kernel digits of the name of a kernel and its network, hexadecimal: two of 10,000 hosts have the same with a
chance of 2e-7."""

ENDED, LISTENS, REFUSED, UNKNOWN = "ended", "listens", "refused", "unknown"
"""What is known of who listened at a port: its own kernel says that nobody does; somebody does; its host refuses, as
after its end, or as a firewall does; nothing."""


def host_identity(hostname: str | None = None) -> tuple[str, str, str]:
    """Hostname (or the one given), boot id, device number of /dev/shm."""
    memory = Path("/dev/shm")
    return (
        hostname or socket.gethostname(),
        BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
        str(memory.stat().st_dev) if memory.exists() else "",
    )


@lru_cache(maxsize=1)
def own_kernel() -> str:
    """The name of this boot of this host, with this process's network; empty where they cannot be told apart."""
    try:
        boot, network = BOOT_ID.read_text().strip(), NETWORK.stat().st_ino
    except OSError as error:
        log.debug("this kernel does not say which it is: %s", error)
        return ""
    words = f"{boot} {network} {socket.gethostname()}"  # a copy of a running machine has the same boot
    return hashlib.sha256(words.encode()).hexdigest()[:KERNEL_DIGITS] if boot else ""


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets: the descriptor, and a duplicate that is closed when the next one is asked for.

    None where the kernel shows no descriptors.
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
        except OSError:  # closed meanwhile
            continue
        try:
            connection = socket.socket(type=_AS_IT_IS, fileno=copy)
        except OSError:  # another file's descriptor by now, or of a kind that has no name
            os.close(copy)
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.proto == socket.IPPROTO_TCP:
                yield descriptor, connection


def outside_connections() -> Iterator[tuple[str, str, socket.socket]]:
    """This process's TCP connections with other hosts: own address, the peer's, and a duplicate as of `tcp_sockets`."""
    for _, connection in tcp_sockets():
        with suppress(OSError):  # not connected
            own, peer = str(connection.getsockname()[0]), str(connection.getpeername()[0])
            if own != peer:
                yield own, peer, connection


class TcpInfo(NamedTuple):
    """What the kernel has counted of one TCP connection so far; 0 for what it is too old to count.

    Attributes:
        timeouts: Retransmissions in a row, since something was acknowledged last.
        unacknowledged: Segments under way.
        retransmitted: Segments that were sent again.
        acknowledged_nbytes: Payload; from Linux 4.1 on.
        trip_seconds: The shortest round trip; from Linux 4.9 on, 0 before the first one.
        segments: Sent, with data.
        busy_seconds: In which something was under way, from Linux 4.10 on as the next two; in ticks of milliseconds.
        receiver_seconds: Of these, in which the receiver took no more.
        sender_seconds: Of these, in which the sender's buffer held no more.
        sent_twice: Segments that were sent again for nothing; from Linux 5.4 on.
        is_whole: Whether the kernel counts all of them.
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
        """What the kernel says now.

        Args:
            connection: Of TCP.

        Raises:
            OSError: It is none, or was closed.
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
    """Holds what a TCP connection sends to a rate; TCP paces by itself where no fq queue does (tcp(7), tc-fq(8)).

    Args:
        connection: Of TCP.
        bytes_per_second: Of payload and headers; 1 at least.
    """
    rate = min(max(int(bytes_per_second), 1), _MOST_PACED)
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))


def is_listened_at(port: int) -> bool | None:
    """Whether anybody in this network namespace listens at a TCP port, as the kernel says; None where it does not."""
    known = False
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError as error:  # no IPv6, say
            log.debug("the kernel does not list its sockets: %s", error)
            continue
        known = True
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                return True
    return False if known else None


def listener_state(kernel: str, port: int, addresses: Sequence[str]) -> str:
    """What is known of a process that listened at a port: `ENDED`, `LISTENS`, `REFUSED` or `UNKNOWN`.

    Args:
        kernel: `own_kernel` of that process.
        port: Where it listened for as long as it lived.
        addresses: Of its host.
    """
    if kernel and kernel == own_kernel():
        listened_at = is_listened_at(port)
        if listened_at is not None:
            return LISTENS if listened_at else ENDED
    deadline, found = time.monotonic() + CALLS_SECONDS, UNKNOWN
    for address in of_others(addresses):
        seconds = min(CALL_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            break
        try:
            socket.create_connection((address, port), seconds).close()
        except OSError as error:
            log.debug("nobody answers at %s, port %d: %s", address, port, error)
            if isinstance(error, ConnectionRefusedError):
                found = REFUSED
            continue
        return LISTENS
    return found


def of_others(addresses: Sequence[str]) -> list[str]:
    """Those of some addresses that are not this host's own: who is called there may be anybody."""
    own = {*interface_addresses(), LOOPBACK}
    return [each for each in addresses if each not in own]


def to_call(kernel: str, addresses: Sequence[str]) -> list[str]:
    """The addresses at which a process can be called: on this kernel the loopback, where no firewall is."""
    if kernel and kernel == own_kernel():
        return [LOOPBACK, *(each for each in addresses if each != LOOPBACK)]
    return of_others(addresses) or list(addresses)


def _forget() -> None:
    own_kernel.cache_clear()


os.register_at_fork(after_in_child=_forget)  # which may move to another network
