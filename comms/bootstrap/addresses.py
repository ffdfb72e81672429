"""Where other ranks may reach this host, from its kernel alone: no name is looked up that could take time, or mislead.

A host's own name is of no use here: it may not resolve at all, resolve to 127.0.1.1 (Debian), or to an address of
another host. There may be no default route either. What the kernel has given to the interfaces is right, always there,
and known in a millisecond. Names of others are looked up on a thread, and for a bounded time.
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
"""Addresses that are nobody's (RFC 5737, RFC 3849): the route to them is the one outwards."""

MOST_ADDRESSES = 8
"""The most addresses of one host that are told to others: each may cost a caller seconds, and a host of containers has
hundreds."""

LOOK_UP_SECONDS = 1.0
"""Seconds for the address of a name. Where it takes longer, other addresses may be tried before the best one."""

_DUMP_ADDRESSES, _NEW_ADDRESS, _DONE, _ERROR = 22, 20, 3, 2
_ADDRESS, _LOCAL = 1, 2
_HEADER, _ADDRESS_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_REQUEST_DUMP = 0x301
_UNUSABLE = 0x40 | 0x08
"""Tentative, or a duplicate of another host's. Source of all of these: rtnetlink(7), linux/if_addr.h."""


def own_addresses(toward: str | None = None, seconds: float = LOOK_UP_SECONDS) -> list[str]:
    """Addresses at which other ranks may reach this host: the best one first, the loopback last.

    Args:
        toward: A host that this one has reached already: the route to it is known to work.
        seconds: How long its name may take to be looked up; 0 waits for nothing.
    """
    first = sources((socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in _found(toward, seconds))
    others = sorted([*sources(ROUTES), *interface_addresses()], key=lambda each: (_is_a_makeshift(each), ":" in each))
    outside = [each for each in dict.fromkeys([*first, *others]) if is_outside(each)]
    return [*outside[:MOST_ADDRESSES], LOOPBACK]


@dataclass(frozen=True, slots=True)
class HostAddress:
    """What the kernel has given to an interface.

    Attributes:
        index: Of the interface.
        address: IPv4 or IPv6.
        prefix: Bits that all of its network share.
    """

    index: int
    address: str
    prefix: int


def interface_addresses() -> list[str]:
    """What the kernel has given to this host's interfaces, IPv4 and IPv6; none where it cannot be asked."""
    return [each.address for each in host_addresses()]


def host_addresses() -> list[HostAddress]:
    """As `interface_addresses`, with interfaces and networks."""
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
    """The one address that a message of the kernel is about; none where it cannot be used."""
    family, prefix, flags, _, index = _ADDRESS_HEADER.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & _UNUSABLE:
        return
    found: dict[int, bytes] = {}
    rest = message[_ADDRESS_HEADER.size :]
    while len(rest) >= _ATTRIBUTE.size:
        nbytes, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : nbytes]
        rest = rest[_aligned(max(nbytes, _ATTRIBUTE.size)) :]
    own = found.get(_LOCAL) or found.get(_ADDRESS)  # of a point-to-point link the other one is the far end's
    if own is not None:
        yield HostAddress(index, socket.inet_ntop(family, own), prefix)


def _aligned(nbytes: int) -> int:
    return (nbytes + 3) & ~3


def sources(destinations: Iterable[tuple[int, str]]) -> list[str]:
    """The address from which this host would send to each destination, where it has a route."""
    found = []
    for family, destination in destinations:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((destination, 9))  # nothing is sent: the route alone is looked up
                found.append(str(probe.getsockname()[0]))
        except OSError as error:
            log.debug("no route to %s: %s", destination, error)
    return found


def is_outside(address: str) -> bool:
    """Whether it may be reached from another host: link-local addresses of IPv6 are none without an interface."""
    found = ip_address(address)
    return not (
        found.is_loopback or found.is_unspecified or found.is_multicast or (":" in address and found.is_link_local)
    )


def _is_a_makeshift(address: str) -> bool:
    """Given where nobody gives any (169.254.x.y): other hosts may have the same."""
    return ip_address(address).is_link_local


class _LookUps:
    """Addresses of names, each looked up once a process on a thread of its own: a resolver may take half a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._addresses: dict[str, list[str]] = {}

    def find(self, host: str, seconds: float) -> list[str]:
        """Those that are known after at most so long."""
        with self._lock:
            thread = self._threads.get(host)
            if thread is None:
                thread = BackgroundThread(
                    "gradwire look-up",
                    partial(self._look_up, host),
                    without=f"the address of {host} is not known",
                    on_failure=lambda error: None,  # whoever looks it up waits for a bounded time, and finds nothing
                    awaited=False,
                )
                self._threads[host] = thread
                thread.start()
        thread.join(seconds)
        return self._addresses.get(host, [])

    def _look_up(self, host: str) -> None:
        try:
            self._addresses[host] = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
        except (OSError, ValueError) as error:  # ValueError: of a name that none can be
            log.debug("%s has no address: %s", host, error)


_look_ups = _LookUps()


def _found(host: str | None, seconds: float) -> list[str]:
    """The addresses of a host; one that is an address already is not looked up."""
    if not host:
        return []
    try:
        return [str(ip_address(host.partition("%")[0]))]
    except ValueError:
        return list(dict.fromkeys(_look_ups.find(host, seconds)))


def listener(backlog: int) -> socket.socket:
    """A socket at a port that the system chooses; IPv4 and IPv6 where there is both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:  # switched off on this host
            log.debug("no IPv6 here: %s", error)
    return socket.create_server(("", 0), backlog=backlog)
