"""Addresses at which other ranks can reach this host, from its kernel, without resolving the host's own name.

A host's own name may not resolve at all, resolve to 127.0.1.1 (Debian), or to the address of another host. There may be
no default route either. The kernel's list of interface addresses is correct, always available, and read in a
millisecond. Names of other hosts are resolved on a thread, for a bounded time.
"""

import logging
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from gradwire.comms.bootstrap.threads import BackgroundThread

log = logging.getLogger("gradwire")

LOOPBACK = "127.0.0.1"

ROUTES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route."""

MOST_ADDRESSES = 8
"""Addresses of one host that are published, at most: each may cost a client seconds, and a host of containers has
hundreds."""

LOOK_UP_SECONDS = 1.0
"""Timeout of resolving a name. If it takes longer, other addresses may be tried before the best one."""

_DUMP_ADDRESSES, _NEW_ADDRESS, _DONE, _ERROR = 22, 20, 3, 2
_ADDRESS, _LOCAL = 1, 2
_HEADER, _ADDRESS_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_REQUEST_DUMP = 0x301
_UNUSABLE = 0x40 | 0x08
"""Flags of an address that is tentative, or a duplicate of another host's. Source of all of these: rtnetlink(7),
linux/if_addr.h."""


def own_addresses(toward: str | None = None, seconds: float = LOOK_UP_SECONDS) -> list[str]:
    """Returns the addresses at which other ranks may reach this host: the best one first, the loopback last.

    They are `MOST_ADDRESSES` and the loopback, at most.

    Args:
        toward: Host that this one has reached already, so that the route to it is known to work.
        seconds: Timeout of resolving its name; 0 does not wait.
    """
    first = sources((socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in _found(toward, seconds))
    others = sorted([*sources(ROUTES), *interface_addresses()], key=lambda each: (_is_link_local(each), ":" in each))
    outside = [each for each in dict.fromkeys([*first, *others]) if is_outside(each)]
    return [*outside[:MOST_ADDRESSES], LOOPBACK]


@dataclass(frozen=True, slots=True)
class HostAddress:
    """An address of a network interface.

    Attributes:
        index: Number of the interface in the kernel (`if_nametoindex`).
        address: IPv4 or IPv6.
        prefix: Bits that all of its network share.
    """

    index: int
    address: str
    prefix: int


def interface_addresses() -> list[str]:
    """Returns the IPv4 and IPv6 addresses of this host's interfaces; empty if the kernel does not list them."""
    return [each.address for each in host_addresses()]


def host_addresses() -> list[HostAddress]:
    """Returns the addresses of this host's interfaces, each with its interface and network.

    Empty if the kernel does not list them, as outside Linux. Tentative and duplicate addresses are left out.
    """
    if not hasattr(socket, "AF_NETLINK"):
        return []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(LOOK_UP_SECONDS)
            nbytes = _HEADER.size + _ADDRESS_HEADER.size
            kernel.send(
                _HEADER.pack(nbytes, _DUMP_ADDRESSES, _REQUEST_DUMP, 1, 0) + _ADDRESS_HEADER.pack(0, 0, 0, 0, 0)
            )
            return list(_listed(kernel))
    except OSError as error:
        log.debug("the kernel does not list this host's addresses: %s", error)
        return []


def _listed(kernel: socket.socket) -> Iterator[HostAddress]:
    while True:
        answer = kernel.recv(1 << 16)
        while answer:
            nbytes, kind, *_ = _HEADER.unpack_from(answer)
            if kind in (_DONE, _ERROR):
                return
            if kind == _NEW_ADDRESS:
                yield from _address(answer[_HEADER.size : nbytes])
            answer = answer[_aligned(nbytes) :]


def _address(message: bytes) -> Iterator[HostAddress]:
    """Yields the address in a netlink message, unless it cannot be used."""
    family, prefix, flags, _, index = _ADDRESS_HEADER.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & _UNUSABLE:
        return
    found: dict[int, bytes] = {}
    rest = message[_ADDRESS_HEADER.size :]
    while len(rest) >= _ATTRIBUTE.size:
        nbytes, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : nbytes]
        rest = rest[_aligned(max(nbytes, _ATTRIBUTE.size)) :]
    # On a point-to-point link _ADDRESS is that of the other end.
    own = found.get(_LOCAL) or found.get(_ADDRESS)
    if own is not None:
        yield HostAddress(index, socket.inet_ntop(family, own), prefix)


def _aligned(nbytes: int) -> int:
    return (nbytes + 3) & ~3


def sources(destinations: Iterable[tuple[int, str]]) -> list[str]:
    """Returns the source address that this host would use for each destination to which it has a route."""
    found = []
    for family, destination in destinations:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Sends nothing for UDP: only looks up the route.
                probe.connect((destination, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError as error:
            log.debug("no route to %s: %s", destination, error)
    return found


def is_outside(address: str) -> bool:
    """Returns whether other hosts may reach an address; IPv6 link-local ones, which need an interface, do not count."""
    found = ip_address(address)
    return not (
        found.is_loopback or found.is_unspecified or found.is_multicast or (":" in address and found.is_link_local)
    )


def _is_link_local(address: str) -> bool:
    """Returns whether an IP address is link-local (169.254.x.y, fe80::): self-assigned, so other hosts may have it."""
    return ip_address(address).is_link_local


class _LookUps:
    """Cache of resolved names. Each is resolved once per process, on a thread: a resolver may take half a minute.

    Thread safety: `find` may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards _threads.
        # Host name -> thread that resolves it, and addresses found; each thread sets the entry of its own host.
        self._threads: dict[str, threading.Thread] = {}
        self._addresses: dict[str, list[str]] = {}

    def find(self, host: str, seconds: float) -> list[str]:
        """Returns the addresses of a host that are known after at most `seconds`."""
        with self._lock:
            thread = self._threads.get(host)
            if thread is None:
                thread = BackgroundThread(
                    "gradwire look-up",
                    partial(self._look_up, host),
                    without=f"the address of {host} is not known",
                    # Callers wait for a bounded time, and find no address.
                    on_failure=lambda error: None,
                    awaited=False,
                )
                self._threads[host] = thread
                thread.start()
        thread.join(seconds)
        return self._addresses.get(host, [])

    def _look_up(self, host: str) -> None:
        try:
            self._addresses[host] = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        except (OSError, ValueError) as error:
            # ValueError means that the name is malformed.
            log.debug("%s has no address: %s", host, error)


_look_ups = _LookUps()


def _found(host: str | None, seconds: float) -> list[str]:
    """Returns the addresses of a host that are known after at most `seconds`; an IP address is not resolved."""
    if not host:
        return []
    try:
        return [str(ip_address(host.partition("%")[0]))]
    except ValueError:
        return list(dict.fromkeys(_look_ups.find(host, seconds)))


def listener(backlog: int) -> socket.socket:
    """Opens a listening socket on a free port, for IPv4 and IPv6 if the host has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            # IPv6 is disabled on this host.
            log.debug("no IPv6 here: %s", error)
    return socket.create_server(("", 0), backlog=backlog)
