"""Notices within a second that the process of another rank has ended, where collectives themselves do not say so.

A collective of NCCL waits on the device for a rank that is gone, and nobody is told. So every rank keeps a connection
to the rank after it and one to the rank before it. The kernel closes the connections of a process that ends, however it
ends; a host that disappears shows by TCP's keep-alive. A process that is merely slow keeps its connections, so there is
no false alarm. What two neighbours see reaches all others through the store.
"""

import json
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

LOOK_SECONDS = 1.0
"""Between two looks at the store's alarm."""

CONNECT_SECONDS = 3.0
"""For each address of the next rank."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between questions, unanswered questions: a host that is gone shows after 11 s."""

ORDERLY = b"."
"""Sent by a rank that closes with nothing under way."""

Lost = Callable[[Exception], None]
"""Called once, from the ring's thread, with what happened; `missing` holds ranks where they are known."""


class LivenessRing:
    """One rank's end of the ring.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        size: Number of ranks.
        alarm: Returns why another rank has given up; None while none has.
        lost: Called when a rank is gone.
        overdue: Asked once a second; what it returns, this rank gives up for.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        alarm: Callable[[], str | None],
        lost: Lost,
        overdue: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._alarm = alarm
        self._lost = lost
        self._overdue = overdue
        self._peers: dict[socket.socket, int] = {}
        self._closed = threading.Event()
        self._orderly = False
        self._waker, self._woken = socket.socketpair()
        self._listener = socket.create_server(("", 0), backlog=8)
        self._thread = threading.Thread(target=self._run, name=f"gradwire liveness {rank}", daemon=True)
        self._thread.start()

    def close(self, *, orderly: bool = True) -> None:
        """Leaves the ring.

        Args:
            orderly: Nothing is under way; else the other ranks hear that this one is gone.
        """
        if self._closed.is_set():
            return
        self._orderly = orderly
        self._closed.set()
        self._waker.close()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_SECONDS)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._listener, selectors.EVENT_READ)
                try:
                    self._connect(selector)
                    while not self._closed.is_set():
                        self._look(selector)
                except PeerError as error:
                    if not self._closed.is_set():
                        self._lost(error)
                if self._orderly:
                    self._say_goodbye(selector)
            finally:
                for each in (*self._peers, self._listener, self._woken):
                    each.close()

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Raises a PeerError where a rank is gone."""
        for key, _ in selector.select(LOOK_SECONDS):
            found = key.fileobj
            if found is self._listener:
                self._accept(selector)
            elif isinstance(found, socket.socket) and found in self._peers:
                self._hear(selector, found)
        if reason := self._alarm() or self._overdue():
            raise PeerError(reason)

    def _hear(self, selector: selectors.BaseSelector, peer: socket.socket) -> None:
        rank = self._peers[peer]
        try:
            heard = peer.recv(1)
        except OSError as error:
            raise PeerError(f"rank {rank} does not answer any more ({error})", (rank,)) from error
        if heard != ORDERLY and not self._has_left(rank):
            raise PeerError(f"the process of rank {rank} has ended", (rank,))
        selector.unregister(peer)
        del self._peers[peer]
        peer.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        accepted, _ = self._listener.accept()
        accepted.settimeout(CONNECT_SECONDS)
        self._watch(selector, accepted, int.from_bytes(accepted.recv(4), "big"))

    def _say_goodbye(self, selector: selectors.BaseSelector) -> None:
        """Also to a rank whose connection waits to be accepted, and through the store to one that comes later."""
        try:
            self._store.set(f"left/{self._rank}", "1")
            while any(key.fileobj is self._listener for key, _ in selector.select(0)):
                self._accept(selector)
            for peer in self._peers:
                peer.sendall(ORDERLY)
        except (OSError, RuntimeError) as error:
            log.debug("the other ranks or their store were gone before this rank said goodbye: %s", error)

    def _has_left(self, rank: int) -> bool:
        try:
            return self._store.check([f"left/{rank}"])
        except RuntimeError as error:
            log.debug("the store cannot say whether rank %d has left in order: %s", rank, error)
            return False

    def _connect(self, selector: selectors.BaseSelector) -> None:
        """Says where this rank is, and connects to the next one."""
        self._store.set(f"alive/{self._rank}", json.dumps([self._listener.getsockname()[1], own_addresses()]))
        following = (self._rank + 1) % self._size
        while not self._store.check([f"alive/{following}"]):
            if self._closed.wait(0.05):
                return
        port, addresses = json.loads(self._store.get(f"alive/{following}"))
        for address in addresses:
            try:
                made = socket.create_connection((address, port), CONNECT_SECONDS)
            except OSError:
                continue
            made.sendall(self._rank.to_bytes(4, "big"))
            self._watch(selector, made, following)
            return
        if self._has_left(following):
            return
        log.warning(
            "rank %d cannot reach rank %d at port %d of %s: if that rank is lost, this one hears of it from another "
            "rank or by the time-out",
            self._rank,
            following,
            port,
            ", ".join(addresses),
        )

    def _watch(self, selector: selectors.BaseSelector, peer: socket.socket, rank: int) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers[peer] = rank
        selector.register(peer, selectors.EVENT_READ)


class Deadline:
    """Says when work on a device has been under way for too long. Any thread.

    Args:
        timeout: For each event that is watched.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._marks: deque[tuple[float, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    def watch(self, event: torch.cuda.Event) -> None:
        """Expects an event, recorded behind what was issued, to pass within the time-out."""
        with self._lock:
            self._drop_passed()
            self._marks.append((time.monotonic(), event))

    @property
    def is_under_way(self) -> bool:
        """Whether the device has not reached all events yet."""
        with self._lock:
            self._drop_passed()
            return bool(self._marks)

    def overdue(self) -> str | None:
        """Why to give up; None while there is time."""
        with self._lock:
            self._drop_passed()
            if not self._marks or time.monotonic() - self._marks[0][0] < self._seconds:
                return None
        return f"no progress for {self._seconds:g} s: a rank is late, or has issued other collectives"

    def _drop_passed(self) -> None:
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            self._marks.popleft()


def own_addresses() -> list[str]:
    """Addresses at which other ranks may reach this host, the loopback last; IPv4."""
    found: list[str] = []
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError as error:
        log.debug("this host's name has no address: %s", error)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the route alone is looked up (TEST-NET-1, RFC 5737)
            found.insert(0, probe.getsockname()[0])
        except OSError as error:
            log.debug("no route outwards: %s", error)
    outside = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return [*outside, "127.0.0.1"]
