"""How ranks hear of each other without the store: each process listens at a port of its own.

Where the store is gone nobody can say who is missing. The kernel can: nobody listens at the port of a process that has
ended, however it ended, and a process that is stopped, or cut off, does not answer.
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

from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.kernel import ENDED as ENDED_HERE
from gradwire.comms.bootstrap.kernel import look_at, to_call
from gradwire.comms.bootstrap.losses import LONGEST_WORD_NBYTES, Loss
from gradwire.comms.bootstrap.strangers import Strangers
from gradwire.comms.bootstrap.threads import BackgroundThread, call_each
from gradwire.comms.boundary.messages import Addresses, Kernel, MessageType, Port
from gradwire.comms.boundary.proof import NONCE_NBYTES, PROOF_NBYTES, is_proved, new_nonce, proof_of
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

NAME_NBYTES = 16
"""Bytes of a start's name, in ASCII. It is the secret of the ranks of a start, and is never said: a caller says a
digest of it and of the rank's number, and proves that it knows the name. Strangers hear nothing, and replay nothing."""

DIGEST_NBYTES = 16
"""Bytes of that digest."""

GREETING = b"gradwire door 2"
"""What a door says at first, before a nonce: another service at the port says something else."""

CALL_SECONDS = 2.0
"""Seconds for each address of a rank to be reached, and for the rank to answer: it may hold the GIL for a while."""

ANSWER_SECONDS = 1.0
"""Seconds for one byte into an empty buffer."""

LOOK_SECONDS = 5.0
"""Seconds between two looks for callers who have said nothing for long."""

CALLS = 64
"""Most calls of one rank after one failure: they are made all at once."""

WITNESSES = 2
"""Ranks of a host that are called besides, to know whether it lets callers in."""

FIRST_LOOK_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
"""Seconds for which a rank waits for others to come before it looks whether they have ended, and the longest pause
between two looks: each is twice as long as the one before."""

ALARM_SECONDS = 1.0
"""Seconds between two looks of such a rank for an alarm: one server answers those of all ranks."""

HERE, LEFT = b"+", b"-"
ASK, TELL = b"?", b"!"
"""First byte behind the digest and a nonce: whether it is here, or what has happened, as 4 bytes of length and a
`Loss`; then the caller's proof. The answer is `HERE` with a proof, or `LEFT`."""

ANSWERS, ENDED, REFUSED, SILENT = "answers", "has ended", "refuses connections", "does not answer"
"""What is known of a rank that was called. A rank whose process lives on without this communicator has ended, too. One
that refuses connections has ended, or a firewall rejects them; it has where the caller's own kernel says so, or where
another rank of its host has let the caller in."""


class Door:
    """Answers callers while any communicator of this process is open. `Door.open()` is shared by all of them."""

    _lock = threading.RLock()
    """Garbage that is collected while a thread holds it may close a door."""
    _shared: "Door | None" = None

    def __init__(self) -> None:
        self._listener = listener(1024)
        self._users = 0
        self._names: dict[bytes, bytes] = {}
        """Digest -> name of a start and number of a rank."""
        self._heard: dict[bytes, Loss] = {}
        self._closed = self._failed = False
        self.port: int = self._listener.getsockname()[1]
        BackgroundThread(
            "gradwire door",
            self._serve,
            without="other ranks that ask whether this one has ended hear that it does not answer",
            on_failure=self._fail,
            awaited=False,
        ).start()

    @classmethod
    def open(cls) -> "Door":
        """This process's, for one more user, who closes it."""
        with cls._lock:
            door = cls._shared = cls._shared or cls()
            door._users += 1
            return door

    def close(self) -> None:
        """Counts one user less; the last one ends it."""
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
        if self._failed:
            self._listener.close()

    def leave_to_parent(self) -> None:
        """Gives up what belongs to the parent (in a forked child)."""
        self._listener.close()

    def answer_for(self, start: str, rank: int) -> None:
        """Callers who ask for that rank of that start are told that it is here."""
        name = _name(start, rank)
        self._names[_digest(name)] = name

    def forget(self, start: str, rank: int) -> None:
        """They are told that it has left."""
        self._names.pop(_digest(_name(start, rank)), None)
        self._heard.pop(_name(start, rank), None)

    def heard(self, start: str, rank: int) -> Loss | None:
        """What that rank was told first."""
        return self._heard.get(_name(start, rank))

    def _fail(self, error: BaseException) -> None:
        """Leaves the port open: were it closed, callers would hear from the kernel that this process has ended."""
        self._failed = True
        if self._closed:
            self._listener.close()

    def _serve(self) -> None:
        with closing(Strangers(self._listener, self._lacks, _greeting)) as strangers:
            while not self._closed:
                try:
                    callers = strangers.next(LOOK_SECONDS)
                except OSError as error:
                    if not self._closed:
                        raise
                    log.debug("the door is closed: %s", error)
                    break
                for caller, said in callers:
                    with caller:
                        try:
                            self._answer(caller, said)
                        except Exception as error:  # noqa: BLE001 - whatever it has sent, others are answered
                            log.debug("a caller has gone again, or is a stranger: %r", error)
        self._listener.close()

    def _lacks(self, heard: bytes) -> int:
        """How many bytes are to come behind those: of a stranger nothing is read but a digest."""
        digest, kind, nbytes = heard[:DIGEST_NBYTES], heard[_HEAD_NBYTES - 1 :][:1], heard[_HEAD_NBYTES:][:4]
        if not kind:
            return _HEAD_NBYTES - len(heard)
        if kind not in (ASK, TELL) or digest not in self._names:
            return 0
        if kind == ASK:
            return _HEAD_NBYTES + PROOF_NBYTES - len(heard)
        if len(nbytes) < 4:
            return 4 - len(nbytes)
        longest = min(int.from_bytes(nbytes, "big"), LONGEST_WORD_NBYTES)
        return _HEAD_NBYTES + 4 + longest + PROOF_NBYTES - len(heard)

    def _answer(self, caller: socket.socket, said: bytes) -> None:
        """Answers a caller; one that does not prove what it says is dropped.

        Raises:
            MessageError: What has happened cannot be read.
            OSError: The caller has gone.
        """
        caller.settimeout(ANSWER_SECONDS)
        greeting, head = said[:_GREETING_NBYTES], said[_GREETING_NBYTES:][:_HEAD_NBYTES]
        word, proof = said[_GREETING_NBYTES + _HEAD_NBYTES : -PROOF_NBYTES], said[-PROOF_NBYTES:]
        name = self._names.get(head[:DIGEST_NBYTES])
        if name is None:
            caller.sendall(LEFT)
            return
        if not is_proved(proof, name, "caller", greeting, head, word):
            log.debug("a caller does not prove that it knows the start's name")
            return
        if head[-1:] == TELL:
            self._heard.setdefault(name, Loss.unpacked(word[4:]))
        caller.sendall(HERE + proof_of(name, "door", greeting, head, word))


_GREETING_NBYTES = len(GREETING) + NONCE_NBYTES
_HEAD_NBYTES = DIGEST_NBYTES + NONCE_NBYTES + 1
"""Bytes of a caller's digest, nonce and kind."""


def _greeting() -> bytes:
    return GREETING + new_nonce()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank can be called.

    Attributes:
        port: Of its process.
        addresses: Of its host, the best one first.
        kernel: That its process runs on; see `own_kernel`.
    """

    port: int
    addresses: tuple[str, ...]
    kernel: str = ""

    @classmethod
    def unpacked(cls, said: bytes) -> "Place":
        """What a rank has said in the store of itself.

        Raises:
            MessageError: It is something else.
        """
        return cls(*_PLACE.read(said))

    def packed(self) -> str:
        """What is said in the store."""
        return json.dumps([self.port, self.addresses, self.kernel])


_PLACE: MessageType[tuple[int, tuple[str, ...], str]] = MessageType(tuple[Port, Addresses, Kernel])


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the ranks of one start can be called.

    Attributes:
        start: Its name.
        rank: This rank.
        doors: Of each rank that has one.
        near: Ranks of this rank's node.
        door: Where this rank hears what others tell it.
    """

    start: str
    rank: int
    doors: Mapping[int, Place]
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
        """What is known of some ranks: `ANSWERS`, `ENDED`, `REFUSED` or `SILENT`; in some seconds, however many.

        Args:
            ranks: At most `CALLS` of them are called.
        """
        found = self._all(ranks, ASK)
        refused = [rank for rank, outcome in found.items() if outcome == REFUSED]
        witnesses = self._all([each for each in self._of_their_hosts(refused) if each not in found], ASK)
        open_hosts = {
            self.doors[rank].kernel for rank, outcome in {**witnesses, **found}.items() if outcome in (ANSWERS, ENDED)
        }
        return found | {rank: ENDED for rank in refused if self.doors[rank].kernel in open_hosts - {""}}

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that are known to have ended, or to have left, ascending; asked as `call` does."""
        return sorted(rank for rank, outcome in self.call(ranks).items() if outcome == ENDED)

    def _of_their_hosts(self, ranks: Sequence[int]) -> list[int]:
        """A few other ranks of the hosts of some."""
        hosts: dict[str, list[int]] = {self.doors[rank].kernel: [] for rank in ranks}
        for rank, place in self.doors.items():
            if place.kernel in hosts and rank not in ranks and len(hosts[place.kernel]) < WITNESSES:
                hosts[place.kernel].append(rank)
        return [rank for few in hosts.values() for rank in few]

    def tell(self, ranks: Sequence[int], loss: Loss) -> None:
        """Tells some ranks of a loss; those that cannot be reached hear nothing.

        Args:
            ranks: At most `CALLS` of them are told.
            loss: Which.
        """
        said = loss.packed(self.rank)
        self._all(ranks, TELL + len(said).to_bytes(4, "big") + said)

    def heard(self) -> Loss | None:
        """What another rank has told this one first."""
        return None if self.door is None else self.door.heard(self.start, self.rank)

    def _all(self, ranks: Sequence[int], said: bytes) -> dict[int, str]:
        known = [rank for rank in ranks if rank in self.doors][:CALLS]
        if not known:
            return {}
        found = call_each(lambda rank: self._call(rank, said), known, "gradwire call", awaited=False)
        return dict(zip(known, found, strict=True))

    def _call(self, rank: int, said: bytes) -> str:
        place = self.doors[rank]
        if look_at(place.kernel, place.port, ()) == ENDED_HERE:
            return ENDED
        refused = silent = False
        for address in to_call(place.kernel, place.addresses):
            try:
                with socket.create_connection((address, place.port), CALL_SECONDS) as called:
                    answer = _ask(called, _name(self.start, rank), said)
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                refused = True
                continue
            except OSError as error:
                log.debug("rank %d cannot be called at %s, port %d: %s", rank, address, place.port, error)
                silent = True
                continue
            if answer == HERE:
                return ANSWERS
            if answer == LEFT:
                return ENDED
            refused = True  # it has gone while it was asked, or somebody else has its port
        return REFUSED if refused and not silent else SILENT


Ended = Callable[[Sequence[int]], list[int]]
"""Gives those of some ranks that are known to have ended; see `Directory.ended`."""


class Looks:
    """When a rank that waits for others to come looks whether they have ended: ever more rarely, while it waits."""

    def __init__(self) -> None:
        self._pause = FIRST_LOOK_SECONDS
        self._next = time.monotonic() + self._pause

    def are_due(self) -> bool:
        """Whether it is time for a look; then the next one comes later."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._next = now + self._pause
        return True


class Awaited:
    """Ranks that this one waits for, as they connect say: who has ended meanwhile does not come.

    Args:
        members: Ranks, as `ended` numbers them.
        index: This rank's among them.
        ended: Says which have ended; None: nobody knows.
        alarm: Says why another rank has given up, None while none has; None: nobody knows.

    Attributes:
        members: See above.
        tell: Tells the others why this rank gives up, who might take its end for the first one.
    """

    def __init__(
        self,
        members: Sequence[int],
        index: int,
        ended: Ended | None,
        alarm: Callable[[], str | None] | None = None,
    ) -> None:
        self.members = members
        self.tell: Callable[[str], None] = lambda reason: None
        self._alarm = alarm
        self._next_alarm = time.monotonic()
        self._others = [*members[index + 1 :], *members[:index]][:CALLS]
        self._ended = ended
        self._looks = Looks()

    def ended(self) -> list[int]:
        """Indices of those that are known to have ended; none between two looks."""
        if self._ended is None or not self._looks.are_due():
            return []
        return sorted(self.members.index(rank) for rank in self._ended(self._others))

    def among(self, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that are known to have ended, asked for now: for an `Agreement`, which waits for few.

        Raises:
            PeerError: Another rank has given up.
        """
        if (reason := self.alarm(at_once=True)) is not None:
            raise PeerError(reason)
        return [] if self._ended is None else self._ended(ranks)

    def alarm(self, *, at_once: bool = False) -> str | None:
        """Why another rank has given up; None where none has, and between two looks.

        Args:
            at_once: Looks now. Who has seen a rank end does, before he names it: it may have heard the alarm and ended.
        """
        now = time.monotonic()
        if self._alarm is None or (now < self._next_alarm and not at_once):
            return None
        self._next_alarm = now + ALARM_SECONDS
        return self._alarm()

    def words(self, ended: Sequence[int], when: str) -> str:
        """What to say of those that have ended: why another rank has given up, or else their numbers.

        Args:
            ended: Their indices.
            when: They have, in words.
        """
        return self.alarm(at_once=True) or self._named(ended, when)

    def lost(self, when: str) -> PeerError | None:
        """Who is waited for in vain, or why; None where nobody is, as far as is known, and between two looks.

        Args:
            when: As for `words`.
        """
        if ended := self.ended():
            if (reason := self.alarm(at_once=True)) is None:
                self.tell(reason := self._named(ended, when))
            return PeerError(reason, tuple(ended))
        reason = self.alarm()
        return PeerError(reason) if reason else None

    def _named(self, ended: Sequence[int], when: str) -> str:
        ranks = ", ".join(str(self.members[index]) for index in ended)
        return f"rank {ranks} has ended {when}: look at its output"


def _close_in_child() -> None:
    """A fork that outlives this process must not keep its port open: callers would wait for an answer."""
    Door._lock = threading.RLock()
    if Door._shared is not None:
        Door._shared.leave_to_parent()
        Door._shared = None


os.register_at_fork(after_in_child=_close_in_child)


def _name(start: str, rank: int) -> bytes:
    return start.encode()[:NAME_NBYTES].ljust(NAME_NBYTES, b"\0") + rank.to_bytes(4, "big")


def _digest(name: bytes) -> bytes:
    return hashlib.sha256(GREETING + name).digest()[:DIGEST_NBYTES]


def _ask(called: socket.socket, name: bytes, said: bytes) -> bytes:
    """Says something to a door, and proves that it may: `HERE`, `LEFT`, or nothing where another program answers.

    Args:
        called: A connection to its port.
        name: Of the start and the rank.
        said: The kind, and what belongs to it.

    Raises:
        OSError: The other end has gone, or is silent.
    """
    greeting = _receive(called, _GREETING_NBYTES)
    if len(greeting) < _GREETING_NBYTES or not greeting.startswith(GREETING):
        return b""
    head, word = _digest(name) + new_nonce() + said[:1], said[1:]
    called.sendall(head + word + proof_of(name, "caller", greeting, head, word))
    answer = _receive(called, 1)
    if answer != HERE:
        return answer
    proved = is_proved(_receive(called, PROOF_NBYTES), name, "door", greeting, head, word)
    return HERE if proved else b""


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """What has come until there are so many bytes, or the other end has closed."""
    heard = b""
    while len(heard) < nbytes and (more := connection.recv(nbytes - len(heard))):
        heard += more
    return heard
