"""How ranks hear of each other without the store: each process listens at a port of its own.

Where the store is gone nobody can say who is missing. The kernel can: it refuses a connection to the port of a process
that has ended, however it ended, and a process that is stopped, or cut off, does not answer.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

log = logging.getLogger("gradwire")

NAME_NBYTES = 16
"""Of a start, in ASCII: what a caller says before its number, so that strangers hear nothing."""

CALL_SECONDS = 2.0
"""For each address of a rank to be reached, and for the rank to answer: it may hold the GIL for a while."""

ACCEPTED_SECONDS = 1.0
"""For whoever has called to say what he wants."""

CALLS = 64
"""At most, of one rank after one failure: they are made all at once."""

HERE, LEFT = b"+", b"-"
ASK, TELL = b"?", b"!"
"""First byte behind the name of a rank: whether it is here, or what has happened, as 4 bytes of length and JSON."""

LONGEST_WORD_NBYTES = 1 << 16
"""Of what a rank is told."""

ANSWERS, ENDED, SILENT = "answers", "has ended", "does not answer"
"""What is known of a rank that was called. A rank whose process lives on without this communicator has ended, too."""


def own_addresses(toward: str | None = None) -> list[str]:
    """Addresses at which other ranks may reach this host, IPv4 before IPv6, the loopback last.

    Args:
        toward: A host that this one has reached already: the route to it is known to work.
    """
    found: list[str] = []
    for family, destination in (*_routes_to(toward), *ROUTES):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((destination, 9))  # nothing is sent: the route alone is looked up
                found.append(probe.getsockname()[0])
        except OSError as error:
            log.debug("no route outwards to %s: %s", destination, error)
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError as error:
        log.debug("this host's name has no address: %s", error)
    outside = [each for each in dict.fromkeys(found) if not each.startswith(("127.", "fe80:")) and each != "::1"]
    return [*sorted(outside, key=lambda address: ":" in address), LOOPBACK]


LOOPBACK = "127.0.0.1"

ROUTES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that are nobody's (RFC 5737, RFC 3849): the route to them is the one outwards."""


def _routes_to(host: str | None) -> list[tuple[socket.AddressFamily, str]]:
    try:
        return [(entry[0], str(entry[4][0])) for entry in socket.getaddrinfo(host, None)] if host else []
    except OSError as error:
        log.debug("%s has no address: %s", host, error)
        return []


def listener(backlog: int) -> socket.socket:
    """A socket at a port that the system chooses; IPv4 and IPv6 where there is both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:  # switched off on this host
            log.debug("no IPv6 here: %s", error)
    return socket.create_server(("", 0), backlog=backlog)


class Door:
    """Answers callers while any communicator of this process is open. `Door.open()` is shared by all of them."""

    _lock = threading.Lock()
    _shared: "Door | None" = None

    def __init__(self) -> None:
        self._listener = listener(1024)
        self._users = 0
        self._names: set[bytes] = set()
        self._heard: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="gradwire door", daemon=True).start()

    @classmethod
    def open(cls) -> "Door":
        """This process's, for one more user, who closes it."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def close(self) -> None:
        """For one user less; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if Door._shared is self:
                Door._shared = None
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        except OSError as error:
            log.debug("the door was closed already: %s", error)

    def leave_to_parent(self) -> None:
        """In a forked child: gives up what belongs to the parent."""
        self._listener.close()

    def answer_for(self, start: str, rank: int) -> None:
        """Callers who ask for that rank of that start are told that it is here."""
        self._names.add(_name(start, rank))

    def forget(self, start: str, rank: int) -> None:
        """They are told that it has left."""
        self._names.discard(_name(start, rank))
        self._heard.pop(_name(start, rank), None)

    def heard(self, start: str, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """What that rank was told first: a reason to give up, and the ranks that are missing."""
        return self._heard.get(_name(start, rank))

    def _serve(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    caller, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        log.debug("nobody is answered any more: %s", error)
                    return
                with caller:
                    try:
                        self._answer(caller)
                    except (OSError, ValueError) as error:
                        log.debug("a caller has gone again, or is a stranger: %s", error)

    def _answer(self, caller: socket.socket) -> None:
        caller.settimeout(ACCEPTED_SECONDS)
        asked = _receive(caller, NAME_NBYTES + 5)
        name, kind = asked[: NAME_NBYTES + 4], asked[NAME_NBYTES + 4 :]
        if name in self._names and kind == TELL:
            nbytes = int.from_bytes(_receive(caller, 4), "big")
            reason, missing = json.loads(_receive(caller, min(nbytes, LONGEST_WORD_NBYTES)))
            self._heard.setdefault(name, (str(reason), tuple(map(int, missing))))
        caller.sendall(HERE if name in self._names else LEFT)


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the ranks of one start can be called.

    Attributes:
        start: Its name.
        rank: This rank.
        doors: Port and addresses of each rank that has any.
        near: Ranks of this rank's node.
        door: Where this rank hears what others tell it.
    """

    start: str
    rank: int
    doors: Mapping[int, tuple[int, tuple[str, ...]]]
    near: Sequence[int] = ()
    door: Door | None = None

    def choice(self, members: Sequence[int]) -> list[int]:
        """Whom to call where the store is gone: rank 0, some of this node, some that take part in what failed.

        Args:
            members: They, if they are known.
        """
        wanted = [*self.near[:2], 0, *self._around(self.near), *self._around(members), *self._around(range(1 << 62))]
        found = dict.fromkeys(each for each in wanted if each != self.rank and each in self.doors)
        return sorted(list(found)[:CALLS])

    def _around(self, ranks: Sequence[int]) -> list[int]:
        """Some of many, from this rank on."""
        if self.rank not in ranks:
            return list(ranks[: CALLS // 4])
        index = ranks.index(self.rank)
        return list(ranks[max(0, index - CALLS // 8) : index + CALLS // 8 + 1])

    def call(self, ranks: Sequence[int]) -> dict[int, str]:
        """What is known of some ranks: `ANSWERS`, `ENDED` or `SILENT`; in some seconds, however many they are.

        Args:
            ranks: At most `CALLS` of them are called.
        """
        return self._all(ranks, ASK)

    def tell(self, ranks: Sequence[int], reason: str, missing: Sequence[int]) -> None:
        """Gives some ranks a reason to give up; those that cannot be reached hear nothing.

        Args:
            ranks: At most `CALLS` of them are told.
            reason: In words.
            missing: The ranks that are gone.
        """
        said = json.dumps([reason[:1000], list(missing)[:CALLS]]).encode()
        self._all(ranks, TELL + len(said).to_bytes(4, "big") + said)

    def heard(self) -> tuple[str, tuple[int, ...]] | None:
        """What another rank has told this one first: why it gives up, and who is missing."""
        return None if self.door is None else self.door.heard(self.start, self.rank)

    def _all(self, ranks: Sequence[int], said: bytes) -> dict[int, str]:
        known = [rank for rank in ranks if rank in self.doors][:CALLS]
        if not known:
            return {}
        with ThreadPoolExecutor(len(known), thread_name_prefix="gradwire call") as pool:
            return dict(zip(known, pool.map(lambda rank: self._call(rank, said), known), strict=True))

    def _call(self, rank: int, said: bytes) -> str:
        port, addresses = self.doors[rank]
        # At the loopback of this host there may be somebody else.
        outside = [address for address in addresses if address != LOOPBACK] or list(addresses)
        silent = False
        for address in outside:
            try:
                with socket.create_connection((address, port), CALL_SECONDS) as called:
                    called.sendall(_name(self.start, rank) + said)
                    answer = _receive(called, 1)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                continue
            except OSError as error:
                log.debug("rank %d cannot be called at %s, port %d: %s", rank, address, port, error)
                silent = True
                continue
            if answer == HERE:
                return ANSWERS
        return SILENT if silent else ENDED


@lru_cache(maxsize=8)
def addresses_of_this_host(toward: str | None) -> tuple[str, ...]:
    """`own_addresses`, looked up once a process: a host's name may take seconds to resolve."""
    return tuple(own_addresses(toward))


def _close_in_child() -> None:
    """A fork that outlives this process must not keep its port open: callers would wait for an answer."""
    Door._lock = threading.Lock()
    if Door._shared is not None:
        Door._shared.leave_to_parent()
        Door._shared = None


os.register_at_fork(after_in_child=_close_in_child)


def _name(start: str, rank: int) -> bytes:
    return start.encode()[:NAME_NBYTES].ljust(NAME_NBYTES, b"\0") + rank.to_bytes(4, "big")


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """What has come until there are so many bytes, or the other end has closed."""
    heard = b""
    while len(heard) < nbytes and (more := connection.recv(nbytes - len(heard))):
        heard += more
    return heard
