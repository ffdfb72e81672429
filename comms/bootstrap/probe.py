"""Peer probing without the store: each process listens on a port of its own, and other ranks connect to it.

When the store is unreachable, no rank can say who is missing. The kernel can: a connection to the port of a process
that has exited is refused, however it exited, and a process that is stopped or cut off does not answer.

- `ProbeServer` is the listener, one per process. It answers "is this rank still here?" and takes failure notices.
- `PeerTable` holds the addresses of one group's ranks, probes them and notifies them.
- `PeerWait` checks during a blocking wait whether a peer has exited or another rank has aborted.
"""

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from gradwire.comms.bootstrap.addresses import LOOK_UP_SECONDS, listener, own_addresses
from gradwire.comms.bootstrap.failures import LONGEST_FAILURE_NBYTES, PeerFailure
from gradwire.comms.bootstrap.kernel import NOTHING_LISTENS, addresses_to_try, listener_state, own_kernel
from gradwire.comms.bootstrap.pending_connections import PendingConnections
from gradwire.comms.bootstrap.threads import BackgroundThread, call_each
from gradwire.comms.boundary.messages import Addresses, Kernel, MessageType, Port
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES, is_proved, new_nonce, proof_of
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

GENERATION_NBYTES = 16
"""Bytes of a generation id, in ASCII. A generation is one start of one group of ranks. Its id is a secret of those
ranks and is never sent: a client sends a digest of the id and the rank number, and proves that it knows the id, so that
other programs learn nothing and can replay nothing."""

DIGEST_NBYTES = 16
"""Bytes of that digest."""

GREETING = b"gradwire probe 2"
"""First bytes that a server sends, followed by a nonce. Another service on the same port sends something else."""

PROBE_SECONDS = 2.0
"""Timeout for connecting to each address of a rank, and for its reply. Its process may hold the GIL for a while."""

ANSWER_SECONDS = 1.0
"""Timeout for sending a reply of some tens of bytes into an empty socket buffer."""

POLL_SECONDS = 5.0
"""Seconds between two checks for connections that have sent nothing for too long."""

MOST_PROBES = 64
"""Ranks that one rank probes after one failure, at most. They are probed in parallel."""

INDIRECT_PROBES = 2
"""Other ranks of a host that are probed when a rank there refuses connections. If one of them accepts, no firewall is
in the way and the refusing process has exited. Compare SWIM's indirect probes (Das, Gupta, Motivala, DSN 2002)."""

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 15.0
"""First and longest pause between two checks whether ranks that have not arrived have exited. Each pause is twice as
long as the one before."""

ABORT_POLL_SECONDS = 1.0
"""Seconds between two checks of the abort signal during a wait. One store server answers those of all ranks."""

REPLY_HERE, REPLY_LEFT = b"+", b"-"
"""First byte of a reply: the rank is here (a proof follows), or this process does not run it any more."""

PROBE, NOTIFY = b"?", b"!"
"""Kind of a request, one byte behind the digest and a nonce. `PROBE` asks whether the rank is here. `NOTIFY` carries a
failure: 4 bytes of length and a packed `PeerFailure`. The client's proof ends either one."""

ANSWERS, EXITED, REFUSED, UNANSWERED = "answers", "has ended", "refuses connections", "does not answer"
"""Outcome of a probe. `EXITED` also means a process that lives on without this group. `REFUSED` proves no exit, because
a firewall may reject connections; it becomes `EXITED` if the own kernel knows that no process listens there, or
if another rank of the same host could be reached."""


class ProbeServer:
    """Listener of this process, shared by all of its communicators. Use `open()` and `close()`.

    Thread safety: all methods may be called from any thread. One background thread accepts and answers connections.
    """

    _lock = threading.RLock()
    """Guards `_shared` and each server's `_users`. Reentrant: while a thread holds it, the garbage collector may run a
    finalizer that closes a server."""
    _shared: "ProbeServer | None" = None

    def __init__(self) -> None:
        self._listener = listener(1024)
        self._users = 0
        # Digest -> secret of (generation, rank), for each rank that this process runs.
        self._secrets: dict[bytes, bytes] = {}
        # Secret -> first failure that a peer has reported to that rank.
        self._reported: dict[bytes, PeerFailure] = {}
        self._closed = self._failed = False
        self.port: int = self._listener.getsockname()[1]
        BackgroundThread(
            "gradwire probe server",
            self._serve,
            without="probes of other ranks find that this process does not answer",
            on_failure=self._fail,
            awaited=False,
        ).start()

    @classmethod
    def open(cls) -> "ProbeServer":
        """Returns the process-wide server and increments its reference count; pair with `close()`."""
        with cls._lock:
            server = cls._shared = cls._shared or cls()
            server._users += 1
            return server

    def close(self) -> None:
        """Decrements the reference count; the last user stops the server."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if ProbeServer._shared is self:
                ProbeServer._shared = None
        self._closed = True
        try:
            # Wakes the background thread, which then closes the socket.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the probe server was closed already: %s", error)
        if self._failed:
            self._listener.close()

    def leave_to_parent(self) -> None:
        """Closes this copy of the socket in a forked child; the port belongs to the parent."""
        self._listener.close()

    def register(self, generation: str, rank: int) -> None:
        """Reports `rank` of `generation` as alive to probes from now on."""
        secret = _secret(generation, rank)
        self._secrets[_digest(secret)] = secret

    def unregister(self, generation: str, rank: int) -> None:
        """Reports `rank` of `generation` as stopped from now on, and drops the failure that was reported to it."""
        self._secrets.pop(_digest(_secret(generation, rank)), None)
        self._reported.pop(_secret(generation, rank), None)

    def reported_failure(self, generation: str, rank: int) -> PeerFailure | None:
        """Returns the first failure that a peer has reported to `rank` of `generation`, or None."""
        return self._reported.get(_secret(generation, rank))

    def _fail(self, error: BaseException) -> None:
        """Keeps the port open after the thread has failed: a closed port would look like an exited process."""
        self._failed = True
        if self._closed:
            self._listener.close()

    def _serve(self) -> None:
        """Accepts and answers connections until the server is closed; the background thread."""
        with closing(PendingConnections(self._listener, self._missing_nbytes, _greeting)) as pending:
            while not self._closed:
                try:
                    complete = pending.next(POLL_SECONDS)
                except OSError as error:
                    if not self._closed:
                        raise
                    log.debug("the probe server is closed: %s", error)
                    break
                for connection, received in complete:
                    with connection:
                        try:
                            self._answer(connection, received)
                        except Exception as error:  # noqa: BLE001 - whatever one client has sent, others are answered
                            log.debug("a client has disconnected, or is no rank of this job: %r", error)
        self._listener.close()

    def _missing_nbytes(self, received: bytes) -> int:
        """Returns how many bytes of a request are still to be read; 0 if it is complete or not for this process."""
        digest, kind, nbytes = (received[:DIGEST_NBYTES], received[_HEAD_NBYTES - 1 :][:1], received[_HEAD_NBYTES:][:4])
        if not kind:
            return _HEAD_NBYTES - len(received)
        # Invariant: nothing but the head is read from a client that does not know the digest of a registered rank.
        if kind not in (PROBE, NOTIFY) or digest not in self._secrets:
            return 0
        if kind == PROBE:
            return _HEAD_NBYTES + PROOF_NBYTES - len(received)
        if len(nbytes) < 4:
            return 4 - len(nbytes)
        longest = min(int.from_bytes(nbytes, "big"), LONGEST_FAILURE_NBYTES)
        return _HEAD_NBYTES + 4 + longest + PROOF_NBYTES - len(received)

    def _answer(self, connection: socket.socket, received: bytes) -> None:
        """Answers one request. A request with a wrong proof is dropped.

        Args:
            connection: The client's connection, which the caller closes.
            received: The greeting that this server has sent, followed by all that the client has sent.

        Raises:
            MessageError: The failure notice is malformed.
            OSError: The client has disconnected.
        """
        connection.settimeout(ANSWER_SECONDS)
        greeting, head = received[:_GREETING_NBYTES], received[_GREETING_NBYTES:][:_HEAD_NBYTES]
        notice, proof = received[_GREETING_NBYTES + _HEAD_NBYTES : -PROOF_NBYTES], received[-PROOF_NBYTES:]
        secret = self._secrets.get(head[:DIGEST_NBYTES])
        if secret is None:
            connection.sendall(REPLY_LEFT)
            return
        if not is_proved(proof, secret, "client", greeting, head, notice):
            log.debug("a client does not prove that it knows the generation id")
            return
        if head[-1:] == NOTIFY:
            # The first failure counts.
            self._reported.setdefault(secret, PeerFailure.unpacked(notice[4:]))
        connection.sendall(REPLY_HERE + proof_of(secret, "server", greeting, head, notice))


_GREETING_NBYTES = len(GREETING) + NONCE_NBYTES
_HEAD_NBYTES = DIGEST_NBYTES + NONCE_NBYTES + 1
"""Bytes of a request's digest, nonce and kind."""


def _greeting() -> bytes:
    return GREETING + new_nonce()


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Address of the probe server of one rank's process.

    Attributes:
        port: TCP port.
        addresses: IP addresses of its host, best first.
        kernel: Id of the kernel and network namespace of its process (see `own_kernel`); empty if unknown.
    """

    port: int
    addresses: tuple[str, ...]
    kernel: str = ""

    @classmethod
    def here(cls, port: int, toward: str | None, seconds: float = LOOK_UP_SECONDS) -> "PeerAddress":
        """Returns the address of a port of this process.

        Args:
            port: TCP port.
            toward: Host that other ranks reach as well, such as the store's; its route decides which address is best.
            seconds: Time for a resolver; addresses that take longer are left out.
        """
        return cls(port, tuple(own_addresses(toward, seconds)), own_kernel())

    def state(self) -> str:
        """Returns whether a process listens there, as far as this host's kernel or a connection attempt can tell.

        Returns:
            `NOTHING_LISTENS`, `LISTENS`, `REFUSED` or `UNKNOWN` of kernel.py. May take some seconds.
        """
        return listener_state(self.kernel, self.port, self.addresses)

    def to_try(self) -> list[str]:
        """Returns the IP addresses to connect to, best first; the loopback first if the process is on this host."""
        return addresses_to_try(self.kernel, self.addresses)

    @classmethod
    def unpacked(cls, text: bytes) -> "PeerAddress":
        """Parses what `packed` returned on another rank.

        Raises:
            MessageError: The bytes are malformed.
        """
        return cls(*_ADDRESS.read(text))

    def packed(self) -> str:
        """Serializes this for the store."""
        return json.dumps([self.port, self.addresses, self.kernel])


_ADDRESS: MessageType[tuple[int, tuple[str, ...], str]] = MessageType(tuple[Port, Addresses, Kernel])


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Addresses of the ranks of one generation, and the probes and notices sent to them.

    Attributes:
        generation: Id of the generation; see `GENERATION_NBYTES`.
        rank: This rank.
        addresses: Address of each rank that has published one.
        near: Ranks of this rank's node.
        server: This process's probe server, which receives the peers' notices; None if it has none.
    """

    generation: str
    rank: int
    addresses: Mapping[int, PeerAddress]
    near: Sequence[int] = ()
    server: ProbeServer | None = None

    def probe_targets(self, members: Sequence[int]) -> list[int]:
        """Picks the ranks to probe when the store is unreachable.

        These are two ranks of this node, rank 0, more of this node, neighbours of this rank among `members`, and
        neighbours among all ranks: at most `MOST_PROBES` in all, of those whose address is known, ascending.

        Args:
            members: Ranks of the failed collective; empty if unknown.
        """
        wanted = [*self.near[:2], 0, *self._around(self.near), *self._around(members), *self._around(range(1 << 62))]
        found = dict.fromkeys(each for each in wanted if each != self.rank and each in self.addresses)
        return sorted(list(found)[:MOST_PROBES])

    def _around(self, ranks: Sequence[int]) -> list[int]:
        """Returns up to 17 of `ranks`: the closest around this rank, or the first 16 if it is not among them."""
        if self.rank not in ranks:
            return list(ranks[: MOST_PROBES // 4])
        index = ranks.index(self.rank)
        return list(ranks[max(0, index - MOST_PROBES // 8) : index + MOST_PROBES // 8 + 1])

    def probe(self, ranks: Sequence[int]) -> dict[int, str]:
        """Probes ranks in parallel; takes some seconds at most, however many they are.

        Args:
            ranks: Ranks to probe. Only the first `MOST_PROBES` with a known address are probed.

        Returns:
            By rank: `ANSWERS`, `EXITED`, `REFUSED` or `UNANSWERED`.
        """
        found = self._send_to_all(ranks, PROBE)
        # A refusal alone may come from a firewall: see if another rank of that host can be reached.
        refused = [rank for rank, outcome in found.items() if outcome == REFUSED]
        indirect = self._send_to_all([each for each in self._of_their_hosts(refused) if each not in found], PROBE)
        reachable_hosts = {
            self.addresses[rank].kernel
            for rank, outcome in {**indirect, **found}.items()
            if outcome in (ANSWERS, EXITED)
        }
        return found | {rank: EXITED for rank in refused if self.addresses[rank].kernel in reachable_hosts - {""}}

    def exited(self, ranks: Sequence[int]) -> list[int]:
        """Probes ranks and returns those whose process has exited or has left the group, in ascending order."""
        return sorted(rank for rank, outcome in self.probe(ranks).items() if outcome == EXITED)

    def _of_their_hosts(self, ranks: Sequence[int]) -> list[int]:
        """Returns up to `INDIRECT_PROBES` other ranks of each host on which one of `ranks` runs."""
        hosts: dict[str, list[int]] = {self.addresses[rank].kernel: [] for rank in ranks}
        for rank, address in self.addresses.items():
            if address.kernel in hosts and rank not in ranks and len(hosts[address.kernel]) < INDIRECT_PROBES:
                hosts[address.kernel].append(rank)
        return [rank for few in hosts.values() for rank in few]

    def notify(self, ranks: Sequence[int], failure: PeerFailure) -> None:
        """Notifies peers of a failure. A peer that cannot be reached is skipped.

        Args:
            ranks: Ranks to notify. Only the first `MOST_PROBES` with a known address are notified.
            failure: The failure.
        """
        packed = failure.packed(self.rank)
        self._send_to_all(ranks, NOTIFY + len(packed).to_bytes(4, "big") + packed)

    def reported_failure(self) -> PeerFailure | None:
        """Returns the first failure that a peer has reported to this rank directly, or None."""
        return None if self.server is None else self.server.reported_failure(self.generation, self.rank)

    def _send_to_all(self, ranks: Sequence[int], request: bytes) -> dict[int, str]:
        """Sends one request to several ranks, a thread for each, and returns the outcome by rank."""
        # Invariant: at most MOST_PROBES threads and connections at a time.
        known = [rank for rank in ranks if rank in self.addresses][:MOST_PROBES]
        if not known:
            return {}
        found = call_each(lambda rank: self._send(rank, request), known, "gradwire probe", awaited=False)
        return dict(zip(known, found, strict=True))

    def _send(self, rank: int, request: bytes) -> str:
        """Sends one request to a rank, trying its addresses in order, and returns the outcome."""
        peer = self.addresses[rank]
        if listener_state(peer.kernel, peer.port, ()) == NOTHING_LISTENS:
            return EXITED
        refused = silent = False
        for address in peer.to_try():
            try:
                with socket.create_connection((address, peer.port), PROBE_SECONDS) as connection:
                    reply = _request(connection, _secret(self.generation, rank), request)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                refused = True
                continue
            except OSError as error:
                log.debug("rank %d cannot be reached at %s, port %d: %s", rank, address, peer.port, error)
                silent = True
                continue
            if reply == REPLY_HERE:
                return ANSWERS
            if reply == REPLY_LEFT:
                return EXITED
            # The process exited during the request, or another program has its port now.
            refused = True
        return REFUSED if refused and not silent else UNANSWERED


FindExited = Callable[[Sequence[int]], list[int]]
"""Returns those of the given ranks whose process is known to have exited; see `PeerTable.exited`."""


class Backoff:
    """Schedule of the checks during a wait: the pause doubles from `FIRST_POLL_SECONDS` to `LONGEST_POLL_SECONDS`."""

    def __init__(self) -> None:
        self._pause = FIRST_POLL_SECONDS
        self._next = time.monotonic() + self._pause

    def is_due(self) -> bool:
        """Returns whether a check is due, and if so schedules the next one."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._pause = min(2 * self._pause, LONGEST_POLL_SECONDS)
        self._next = now + self._pause
        return True


class PeerWait:
    """Liveness check during a blocking wait (for example while connecting): names peers that exited or aborted.

    Args:
        members: Ranks that take part in the wait, as `find_exited` numbers them.
        index: Index of this rank in `members`.
        find_exited: Finds ranks that have exited; None disables that check.
        abort_reason: Returns the reason why another rank has aborted, or None; None disables that check.

    Attributes:
        members: Ranks that take part in the wait.
        notify: Called with the reason before this rank aborts, so that peers do not take it for the origin.
    """

    def __init__(
        self,
        members: Sequence[int],
        index: int,
        find_exited: FindExited | None,
        abort_reason: Callable[[], str | None] | None = None,
    ) -> None:
        self.members = members
        self.notify: Callable[[str], None] = lambda reason: None
        self._abort_reason = abort_reason
        self._next_abort_poll = time.monotonic()
        self._others = [*members[index + 1 :], *members[:index]][:MOST_PROBES]
        self._find_exited = find_exited
        self._backoff = Backoff()

    def _exited(self) -> list[int]:
        """Returns the indices of members that have exited, of the first `MOST_PROBES` after this rank.

        Empty if no check is due.
        """
        if self._find_exited is None or not self._backoff.is_due():
            return []
        return sorted(self.members.index(rank) for rank in self._find_exited(self._others))

    def exited_among(self, ranks: Sequence[int]) -> list[int]:
        """Checks some ranks now and returns those that have exited. `Agreement` calls this for the few it waits for.

        Raises:
            PeerError: Another rank has aborted.
        """
        if (reason := self.abort_reason(at_once=True)) is not None:
            raise PeerError(reason)
        return [] if self._find_exited is None else self._find_exited(ranks)

    def abort_reason(self, *, at_once: bool = False) -> str | None:
        """Returns the reason why another rank has aborted, or None if none has or no check is due.

        Args:
            at_once: Check now. Needed before naming a rank that has exited: it may have exited because of the abort.
        """
        now = time.monotonic()
        if self._abort_reason is None or (now < self._next_abort_poll and not at_once):
            return None
        self._next_abort_poll = now + ABORT_POLL_SECONDS
        return self._abort_reason()

    def describe(self, exited: Sequence[int], when: str) -> str:
        """Returns the error message for members that have exited: another rank's abort reason, or else their numbers.

        Args:
            exited: Indices of the members that have exited.
            when: Clause that follows "has ended", such as "before it had connected".
        """
        return self.abort_reason(at_once=True) or self._named(exited, when)

    def failure(self, when: str) -> PeerError | None:
        """Checks, if that is due, whether a member has exited or another rank has aborted; returns the error, or None.

        If a member has exited and no rank has aborted, `notify` is called with the reason first.

        Args:
            when: Clause that follows "has ended" in the message, such as "before it had connected".
        """
        if exited := self._exited():
            if (reason := self.abort_reason(at_once=True)) is None:
                self.notify(reason := self._named(exited, when))
            return PeerError(reason, tuple(exited))
        reason = self.abort_reason()
        return PeerError(reason) if reason else None

    def _named(self, exited: Sequence[int], when: str) -> str:
        ranks = ", ".join(str(self.members[index]) for index in exited)
        return f"rank {ranks} has ended {when}: look at its output"


def _close_in_child() -> None:
    """Closes the server's socket in a forked child: else peers of an exited parent would wait for a reply."""
    # Another thread may have held the lock at the fork, and does not exist here.
    ProbeServer._lock = threading.RLock()
    if ProbeServer._shared is not None:
        ProbeServer._shared.leave_to_parent()
        ProbeServer._shared = None


os.register_at_fork(after_in_child=_close_in_child)


def _secret(generation: str, rank: int) -> bytes:
    """Returns the key of the HMAC proofs between a rank of a generation and its peers."""
    return generation.encode()[:GENERATION_NBYTES].ljust(GENERATION_NBYTES, b"\0") + rank.to_bytes(4, "big")


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(GREETING + secret).digest()[:DIGEST_NBYTES]


def _request(connection: socket.socket, secret: bytes, request: bytes) -> bytes:
    """Sends a request to a probe server and checks the proof of its reply.

    Args:
        connection: Connection to the server's port.
        secret: Secret of the generation and the rank that is addressed.
        request: Kind and payload.

    Returns:
        `REPLY_HERE`, `REPLY_LEFT`, or something else if another program answers.

    Raises:
        OSError: The server has disconnected, or does not answer in time.
    """
    greeting = _receive(connection, _GREETING_NBYTES)
    if len(greeting) < _GREETING_NBYTES or not greeting.startswith(GREETING):
        return b""
    head, payload = _digest(secret) + new_nonce() + request[:1], request[1:]
    connection.sendall(head + payload + proof_of(secret, "client", greeting, head, payload))
    reply = _receive(connection, 1)
    if reply != REPLY_HERE:
        return reply
    proved = is_proved(_receive(connection, PROOF_NBYTES), secret, "server", greeting, head, payload)
    return REPLY_HERE if proved else b""


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Receives `nbytes` bytes; fewer if the other end closes the connection before."""
    received = b""
    while len(received) < nbytes and (more := connection.recv(nbytes - len(received))):
        received += more
    return received
