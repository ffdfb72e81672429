"""How the ranks of a node come to share memory, all of them or none, and leave nothing behind.

The memory is a file without a name (`memfd_create`): when its last process ends, however it ends, it is gone. The first
rank makes it and hands its descriptor to the others over a socket, whose name the kernel forgets, too (man 7 unix,
abstract sockets). A rank that ends while the group is made closes its connection, so it is named at once.
"""

import errno
import json
import logging
import os
import secrets
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from torch.distributed.distributed_c10d import Store

from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.bootstrap.store import Naps
from gradwire.comms.boundary.messages import Count, MessageError, MessageType, Most, Rank
from gradwire.comms.errors import PeerError, PeerSystemError
from gradwire.compressors.compiled import native

log = logging.getLogger("gradwire")

FOLDER = Path("/dev/shm")
"""Where ranks meet that share this folder and not the network namespace: they see no abstract socket of each other."""

LONGEST_POLL_SECONDS = 0.25
"""Longest pause between two looks of the first rank into the store, for what ranks say there that cannot connect."""

LATE_SECONDS = 5.0
"""Seconds beyond the time-out, for the first rank to say who is missing."""

_CREDENTIALS = struct.Struct("iII")
"""What SO_PEERCRED gives, `struct ucred`: process, user, group. Ids are unsigned (Linux include/linux/socket.h)."""

MESSAGE_NBYTES = 1 << 16
"""Most bytes of what ranks say to each other here; a line each."""

FAILED, ELSEWHERE, DOOR, FOLDER_DOOR = "failed", "elsewhere", "door", "folder_door"


class _Rendezvous:
    """The store, seen as one set of words that the ranks of one group leave for each other."""

    def __init__(self, store: Store, key: str, deadline: float, peer_wait: PeerWait | None) -> None:
        self._store = store
        self._key = key
        self._peer_wait = peer_wait
        self._during = f"during the set-up of the shared-memory group {key!r}"
        self.deadline = deadline

    def say(self, word: str, value: str) -> None:
        self._store.set(f"{self._key}/{word}", value)

    def find(self, word: str) -> str | None:
        """A word, where it is there."""
        if not self._store.check([f"{self._key}/{word}"]):
            return None
        return str(self._store.get(f"{self._key}/{word}").decode())

    def fail(self, message: str) -> None:
        """Gives the first rank, which tells the others, a reason; the store itself may be what has failed."""
        with suppress(RuntimeError):  # our own error is the one to report
            self.say(FAILED, message)

    def hear(self, word: str) -> str:
        """Waits for a word of the first rank.

        A `wait` of the store's own, cut into slices, would make TCPStore log every slice.

        Raises:
            PeerError: It did not come before the deadline, or a rank has ended.
        """
        naps = Naps()
        while (said := self.find(word)) is None:
            self.look_for_losses()
            if time.monotonic() > self.deadline:
                raise self.absent([0])
            naps.sleep(self.deadline)
        return said

    def look_for_losses(self) -> None:
        """Raises a PeerError where a rank has ended, or one of another group has given up, for whom others may wait."""
        if self._peer_wait is not None and (lost := self._peer_wait.failure(self._during)) is not None:
            raise lost

    def absent(self, ranks: Sequence[int]) -> PeerError:
        """Says who is missing."""
        return PeerError(
            f"{self._names(ranks)} did not come to the set-up of the shared-memory group {self._key!r} within "
            "`timeout`",
            tuple(ranks),
        )

    def ended(self, *ranks: int) -> PeerError:
        """Says that ranks have ended, or why another rank has given up: they may have heard of that, and ended."""
        if self._peer_wait is not None:
            return PeerError(self._peer_wait.describe(ranks, self._during), ranks)
        return PeerError(f"{self._names(ranks)} has ended {self._during}: look at its output", ranks)

    def _names(self, ranks: Sequence[int]) -> str:
        """Ranks of this group, by the numbers that they have in the job where these are known."""
        names = ranks if self._peer_wait is None else [self._peer_wait.members[rank] for rank in ranks]
        return f"rank {', '.join(map(str, names))}"


@dataclass(frozen=True, slots=True)
class _Said:
    """A line between two ranks: who has come, or has mapped the memory; that all have, or why not."""

    rank: Rank | None = None
    mapped: bool | None = None
    go: bool | None = None
    failed: str | None = None
    missing: tuple[Rank, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where rank 0 waits, and for what group."""

    name: Annotated[str, Most(100)]
    network: str
    size: Count
    block_nbytes: Count


@dataclass(frozen=True, slots=True)
class _NoOffer:
    """Why rank 0 has no memory."""

    error: str
    errno: int | None


_SAID: MessageType[_Said] = MessageType(_Said, most_nbytes=MESSAGE_NBYTES)
_OFFER: MessageType[_Offer | _NoOffer] = MessageType(_Offer | _NoOffer)


class _Line:
    """A connection between two ranks of one user: lines of JSON, and one descriptor.

    Raises:
        OSError: The other end belongs to another user, is gone, or says what no rank says.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._heard = b""
        self.ended = False
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            raise PermissionError(errno.EPERM, f"a process of user {uid} has called; this one is of user {os.getuid()}")

    def say(self, **said: object) -> None:
        self.socket.sendall(json.dumps(said).encode() + b"\n")

    def give(self, descriptor: int) -> None:
        socket.send_fds(self.socket, [b"\n"], [descriptor])

    def take(self, deadline: float) -> int | None:
        """The descriptor that comes; None where the other end has closed instead."""
        self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
        data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        self.ended = not data
        if descriptors:
            os.set_inheritable(descriptors[0], False)  # recv_fds hands no flags on (Python 3.11)
            return descriptors[0]
        self._heard += data  # of the reason why there is none
        return None

    def hear(self, deadline: float) -> dict[str, object] | None:
        """The next line; None where the other end has closed instead. TimeoutError after the deadline."""
        while (line := self.read()) is None and not self.ended:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self.feed()
        return line

    def feed(self) -> None:
        """Takes in what has arrived."""
        try:
            data = self.socket.recv(4096)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        self._heard += data
        if len(self._heard) > MESSAGE_NBYTES:
            raise OSError(errno.EMSGSIZE, "a rank says too much")

    def read(self) -> dict[str, object] | None:
        """The next line that has arrived whole."""
        line, newline, rest = self._heard.partition(b"\n")
        if not newline:
            return None
        self._heard = rest
        try:
            return {key: each for key, each in asdict(_SAID.read(line)).items() if each is not None}
        except MessageError as error:
            raise OSError(errno.EBADMSG, f"what has come is not from a rank: {error}") from None


REMEDIES = {
    errno.EFBIG: "the limit on the size of files is lower: ulimit -f unlimited",
    errno.EMFILE: "this process has too many open files: raise ulimit -n",
    errno.ENFILE: "this host has too many open files: raise fs.file-max",
    errno.EPERM: "the container's security profile forbids memfd_create or fallocate: allow them",
    errno.EACCES: "the container's security profile forbids memfd_create or fallocate: allow them",
    errno.ENOSYS: "the kernel or sandbox has no memfd_create",
}
"""What to do about an errno of memfd_create(2) or fallocate(2) that does not mean a lack of memory."""

OVER_NETWORK = "or give each rank a node of its own, GRADWIRE_HOSTNAME=rank$RANK, to send over the network instead"


def _remedy(number: int | None) -> str:
    """What a user can do about an error of the system in making shared memory."""
    return f"{REMEDIES.get(number or 0, 'give the container or job more memory')}, {OVER_NETWORK}"


def _allocate(nbytes: int) -> int:
    """Makes memory of `nbytes` that is really there, and returns its descriptor: where there is none, this fails.

    Raises:
        OSError: With what was found, what was wanted and what to do.
    """
    try:
        descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"cannot make shared memory: {error.strerror}; {_remedy(error.errno)}") from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"cannot allocate shared memory: {error.strerror}; wanted {nbytes} bytes: {_remedy(error.errno)}",
        ) from error
    return descriptor


class _First:
    """Rank 0 of the group: makes the memory, hands it out, and says when all have it, or why not.

    Args:
        words: What the ranks say in the store.
        size: Number of ranks.
        closing: Closes what is opened here.
    """

    def __init__(self, words: _Rendezvous, size: int, closing: ExitStack) -> None:
        self._words = words
        self._size = size
        self._closing = closing
        self._selector = closing.enter_context(selectors.DefaultSelector())
        self._name = f"gradwire-{secrets.token_hex(16)}"
        self._lines: dict[int, _Line] = {}
        self._mapped = {0}

    def open(self, block_nbytes: int, map_it: Callable[[int], native.SharedMemoryGroup]) -> native.SharedMemoryGroup:
        try:
            descriptor = _allocate(native.shm_segment_nbytes(self._size, block_nbytes))
        except OSError as error:
            self._words.say(DOOR, json.dumps({"error": error.strerror, "errno": error.errno}))
            raise
        group = map_it(descriptor)  # and owns the descriptor from now on
        if self._size == 1:
            return group
        self._listen(f"\0{self._name}")
        offer = {"name": self._name, "network": _network(), "size": self._size, "block_nbytes": block_nbytes}
        self._words.say(DOOR, json.dumps(offer))
        try:
            self._hand_out(descriptor)
        except PeerError as error:
            self._tell(failed=str(error), missing=error.missing)
            raise
        except BaseException as error:
            self._tell(failed=f"rank 0 could not set the group up: {type(error).__name__}: {error}", missing=())
            raise
        self._tell(go=True)
        return group

    def _listen(self, name: str) -> None:
        listener = self._closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(name)
        listener.listen(self._size)
        self._selector.register(listener, selectors.EVENT_READ)

    def _hand_out(self, descriptor: int) -> None:
        """Returns when all ranks have mapped the memory.

        Raises:
            PeerError: One has ended, has failed, or has not come.
        """
        next_poll = 0.0
        poll_seconds = LONGEST_POLL_SECONDS / 8
        in_folder = False
        while len(self._mapped) < self._size:
            for key, _ in self._selector.select(poll_seconds):
                if isinstance(key.data, _Line):
                    self._hear(key.data, descriptor)
                elif isinstance(key.fileobj, socket.socket):
                    self._accept(key.fileobj)
            now = time.monotonic()
            if now >= next_poll:
                poll_seconds = min(2 * poll_seconds, LONGEST_POLL_SECONDS)
                next_poll = now + poll_seconds
                self._look_for_failures()
                self._words.look_for_losses()
                if not in_folder and (rank := self._words.find(ELSEWHERE)) is not None:
                    in_folder = True
                    self._listen_in_folder(rank)
            if now > self._words.deadline:
                raise self._words.absent([rank for rank in range(self._size) if rank not in self._mapped])

    def _accept(self, listener: socket.socket) -> None:
        connection = self._closing.enter_context(listener.accept()[0])
        try:
            line = _Line(connection)
        except OSError as error:
            log.warning("%s", error)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: _Line, descriptor: int) -> None:
        line.feed()
        while (said := line.read()) is not None:
            rank = said.get("rank")
            if not isinstance(rank, int) or not 0 < rank < self._size:
                raise OSError(errno.EBADMSG, f"what has come is not from a rank: {said}")
            # Invariant: a rank keeps its first connection. A later one is of another process of this user: taken in
            # its place, it would get the memory, and the rank would hear nothing more.
            if self._lines.setdefault(rank, line) is not line:
                log.warning("refused a second connection for rank %d of a shared-memory group", rank)
                self._selector.unregister(line.socket)
                line.socket.close()
                return
            if "mapped" in said:
                self._mapped.add(rank)
            else:
                try:
                    line.give(descriptor)
                except (BrokenPipeError, ConnectionResetError):  # it has ended since it called
                    line.ended = True
        if line.ended:
            self._selector.unregister(line.socket)
            self._look_for_failures()
            for rank, known in self._lines.items():
                if known is line:
                    raise self._words.ended(rank)

    def _look_for_failures(self) -> None:
        if (failed := self._words.find(FAILED)) is not None:
            raise PeerError(failed)

    def _listen_in_folder(self, rank: str) -> None:
        path = FOLDER / f"{self._name}.sock"
        log.info("rank %s is in another network namespace: the ranks of its node meet at %s", rank, path)
        _sweep()
        self._closing.callback(path.unlink, missing_ok=True)
        self._listen(str(path))
        self._words.say(FOLDER_DOOR, str(path))

    def _tell(self, **said: object) -> None:
        for rank, line in self._lines.items():
            try:
                line.say(**said)
            except OSError as error:  # it has ended: the others see it in the first collective
                log.debug("rank %d cannot be told how the set-up has ended: %s", rank, error)


def _join(
    words: _Rendezvous,
    rank: int,
    size: int,
    block_nbytes: int,
    closing: ExitStack,
    map_it: Callable[[int], native.SharedMemoryGroup],
) -> native.SharedMemoryGroup:
    """Every other rank's part."""
    offer = _OFFER.read(words.hear(DOOR))
    if isinstance(offer, _NoOffer):
        raise PeerSystemError(offer.errno, f"rank 0 {offer.error}")
    for name, own, theirs in (("size", size, offer.size), ("block_nbytes", block_nbytes, offer.block_nbytes)):
        if theirs != own:
            raise ValueError(f"`{name}` is {own} here and {theirs} on rank 0: all ranks must pass the same value")
    connection = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    if offer.network == _network():
        place = f"\0{offer.name}"
    else:
        words.say(ELSEWHERE, str(rank))
        place = words.hear(FOLDER_DOOR)
    deadline = words.deadline + LATE_SECONDS
    try:
        connection.connect(place)
        line = _Line(connection)
        line.say(rank=rank)
        descriptor = line.take(deadline)
        group = None
        if descriptor is not None:
            group = map_it(descriptor)
            line.say(rank=rank, mapped=True)
        outcome = line.hear(deadline)
    except TimeoutError as error:
        raise words.absent([0]) from error
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, FileNotFoundError) as error:
        raise words.ended(0) from error
    if outcome is None:
        raise words.ended(0)
    if "go" not in outcome or group is None:
        missing = outcome.get("missing", ())
        assert isinstance(missing, Sequence)
        raise PeerError(str(outcome["failed"]), tuple(missing))
    return group


def _network() -> str:
    """Names this process's network namespace: who is in another one sees no abstract socket of it."""
    try:
        facts = Path("/proc/self/ns/net").stat()
    except OSError as error:  # no /proc: one network for all
        log.debug("this process's network namespace is not known: %s", error)
        return ""
    return f"{facts.st_dev}.{facts.st_ino}"


def _sweep() -> None:
    """Removes the sockets in the folder whose owners were killed while they listened."""
    for path in FOLDER.glob("gradwire-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                facts = path.stat()
                if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.getuid():
                    probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.debug("%s cannot be looked at: %s", path, error)


def open_group(
    store: Store,
    rank: int,
    size: int,
    key: str,
    timeout: timedelta,
    block_nbytes: int,
    peer_wait: PeerWait | None = None,
) -> native.SharedMemoryGroup:
    """Maps new memory in all ranks; returns when every rank has mapped it.

    Raises:
        OSError: There is no memory, here or on the first rank.
        ValueError: A rank disagrees about `size` or `block_nbytes`.
        PeerError: A rank did not join in time, has ended, or has failed.
    """
    words = _Rendezvous(store, key, time.monotonic() + timeout.total_seconds(), peer_wait)

    def map_it(descriptor: int) -> native.SharedMemoryGroup:
        return native.SharedMemoryGroup(descriptor, rank, size, block_nbytes, timeout.total_seconds())

    with ExitStack() as closing:
        try:
            if rank == 0:
                return _First(words, size, closing).open(block_nbytes, map_it)
            return _join(words, rank, size, block_nbytes, closing, map_it)
        except PeerError:
            raise
        except BaseException as error:
            words.fail(f"rank {rank} could not join the shared-memory group {key!r}: {type(error).__name__}: {error}")
            raise
