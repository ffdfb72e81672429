"""This module gives the ranks of a node shared memory: all of them or none; see `open_group`.

The memory is an anonymous file (`memfd_create`), which the kernel frees when its last process exits for any reason.
Rank 0 makes it and sends its descriptor to the other ranks over an abstract Unix socket (man 7 unix), whose name
disappears with the socket. If a rank exits during the set-up, its connection closes, so the error names it at once.
"""

import errno
import json
import logging
import math
import os
import secrets
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
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
"""Folder for a socket with a file name, for ranks in different network namespaces: abstract sockets are not visible
there."""

LONGEST_POLL_SECONDS = 0.25
"""Longest pause in seconds between two polls of the store by rank 0, for messages of ranks that cannot connect."""

LATE_SECONDS = 5.0
"""Seconds that other ranks wait beyond the time-out, for rank 0's message which rank is missing."""

_CREDENTIALS = struct.Struct("iII")
"""Struct of SO_PEERCRED, `struct ucred`: process, user and group id. Source: Linux include/linux/socket.h."""

SEND_SECONDS = 5.0
"""Longest time to send a message of the set-up, which a rank that lives takes at once."""

MESSAGE_NBYTES = 1 << 16
"""Largest number of unread bytes from another rank."""

FAILED, ELSEWHERE, SOCKET, FOLDER_SOCKET = "failed", "elsewhere", "socket", "folder_socket"
"""Keys in the store: an error, a rank in another network namespace, rank 0's offer, and its socket in the folder."""


class _Rendezvous:
    """Messages of one group's ranks in the store during the set-up, and the checks of their waits.

    Args:
        store: Store that the ranks share.
        key: Name of the group; prefix of its keys.
        deadline: Latest time of the set-up, of `time.monotonic`.
        peer_wait: Liveness check of the ranks; None disables it.
    """

    def __init__(self, store: Store, key: str, deadline: float, peer_wait: PeerWait | None) -> None:
        self._store = store
        self._key = key
        self._peer_wait = peer_wait
        self._during = f"during the set-up of the shared-memory group {key!r}"
        self.deadline = deadline

    def publish(self, word: str, value: str) -> None:
        """Publishes a message in the store, under the key `word` of this group.

        Args:
            word: Name of the message.
            value: Its text.
        """
        self._store.set(f"{self._key}/{word}", value)

    def find(self, word: str) -> str | None:
        """Returns the message under the key `word`; None if it is not there."""
        if not self._store.check([f"{self._key}/{word}"]):
            return None
        return str(self._store.get(f"{self._key}/{word}").decode())

    def fail(self, message: str) -> None:
        """Publishes an error for rank 0, which passes it on to all ranks; does nothing if the store has failed."""
        with suppress(RuntimeError):  # our own error is the one to report
            self.publish(FAILED, message)

    def wait_for(self, word: str) -> str:
        """Waits for the message of rank 0 under the key `word`, and returns it.

        It polls, because TCPStore logs every `wait` that times out.

        Raises:
            PeerError: It did not arrive before the deadline, or a rank has exited.
        """
        naps = Naps()
        while (message := self.find(word)) is None:
            self.raise_if_failed()
            if time.monotonic() > self.deadline:
                raise self.absent([0])
            naps.sleep(self.deadline)
        return message

    def raise_if_failed(self) -> None:
        """Raises a PeerError if a rank of this group has exited, or any other rank of the job has signalled an abort.

        Does nothing without a liveness check. It may be called often: the check limits how often it asks the store.
        """
        if self._peer_wait is not None and (failed := self._peer_wait.failure(self._during)) is not None:
            raise failed

    def absent(self, ranks: Sequence[int]) -> PeerError:
        """Returns the error for ranks that did not join."""
        return PeerError(
            f"{self._names(ranks)} did not come to the set-up of the shared-memory group {self._key!r} within "
            "`timeout`",
            tuple(ranks),
        )

    def ended(self, *ranks: int) -> PeerError:
        """Returns the error for ranks that have exited, with the reason of an abort if there was one."""
        if self._peer_wait is not None:
            return PeerError(self._peer_wait.describe(ranks, self._during), ranks)
        return PeerError(f"{self._names(ranks)} has ended {self._during}: look at its output", ranks)

    def _names(self, ranks: Sequence[int]) -> str:
        """Returns the names of ranks of this group, by their ranks in the job if these are known: `rank 4, 5`."""
        names = ranks if self._peer_wait is None else [self._peer_wait.members[rank] for rank in ranks]
        return f"rank {', '.join(map(str, names))}"


@dataclass(frozen=True, slots=True)
class _SetupMessage:
    """A message between two ranks of the group.

    Attributes:
        rank: Sender, when it connects or has mapped the memory.
        mapped: True once the sender has mapped the memory.
        go: True from rank 0 when all ranks have mapped it.
        failed: Reason of a failed set-up.
        missing: Ranks that caused the failure.
    """

    rank: Rank | None = None
    mapped: bool | None = None
    go: bool | None = None
    failed: str | None = None
    missing: tuple[Rank, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """Rank 0's offer of shared memory: the name of its socket, its network namespace, and facts to compare."""

    name: Annotated[str, Most(100)]
    network: str
    size: Count
    block_nbytes: Count


@dataclass(frozen=True, slots=True)
class _NoOffer:
    """Rank 0's error when it could not allocate the memory."""

    error: str
    errno: int | None


_MESSAGE: MessageType[_SetupMessage] = MessageType(_SetupMessage, most_nbytes=MESSAGE_NBYTES)
_OFFER: MessageType[_Offer | _NoOffer] = MessageType(_Offer | _NoOffer)


class _RankConnection:
    """A connection between two ranks of one user, which carries lines of JSON and one file descriptor.

    Args:
        connection: Connected Unix socket.

    Attributes:
        socket: The same socket.
        ended: True once the other end has closed the connection.

    Raises:
        OSError: The other end belongs to another user, or sends invalid messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        self.ended = False
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            raise PermissionError(
                errno.EPERM, f"a process of user {uid} has connected; this one is of user {os.getuid()}"
            )

    def send(self, **message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def send_descriptor(self, descriptor: int) -> None:
        socket.send_fds(self.socket, [b"\n"], [descriptor])

    def receive_descriptor(self, deadline: float) -> int | None:
        """Receives the descriptor; None if the other end sends an error or closes the connection instead."""
        self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
        data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        self.ended = not data
        if descriptors:
            os.set_inheritable(descriptors[0], False)  # recv_fds does not set it (Python 3.11)
            return descriptors[0]
        self._received += data  # first byte of an error message
        return None

    def receive(self, deadline: float) -> dict[str, object] | None:
        """Waits for the next line; None if the other end closes the connection. Raises TimeoutError at the deadline."""
        while (line := self.read()) is None and not self.ended:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self.feed()
        return line

    def feed(self) -> None:
        """Receives what has arrived, without parsing it."""
        try:
            data = self.socket.recv(4096)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        self._received += data
        if len(self._received) > MESSAGE_NBYTES:
            raise OSError(errno.EMSGSIZE, f"a rank has sent more than {MESSAGE_NBYTES} bytes without a reply")

    def read(self) -> dict[str, object] | None:
        """Returns the next complete line that has arrived; None if there is none."""
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        try:
            return {key: each for key, each in asdict(_MESSAGE.read(line)).items() if each is not None}
        except MessageError as error:
            raise OSError(errno.EBADMSG, f"a message is not from a rank: {error}") from None


REMEDIES = {
    errno.EFBIG: "the limit on the size of files is lower: ulimit -f unlimited",
    errno.EMFILE: "this process has too many open files: raise ulimit -n",
    errno.ENFILE: "this host has too many open files: raise fs.file-max",
    errno.EPERM: "the container's security profile forbids memfd_create or fallocate: allow them",
    errno.EACCES: "the container's security profile forbids memfd_create or fallocate: allow them",
    errno.ENOSYS: "the kernel or sandbox has no memfd_create",
}
"""Errno of memfd_create(2) or fallocate(2) -> its cause and fix, if it does not mean a lack of memory."""

OVER_NETWORK = "or give each rank a node of its own, GRADWIRE_HOSTNAME=rank$RANK, to send over the network instead"
"""Alternative to shared memory, for error messages."""


def _remedy(number: int | None) -> str:
    """Returns what a user can do about an errno (`number`; None if unknown) in the allocation of shared memory."""
    return f"{REMEDIES.get(number or 0, 'give the container or job more memory')}, {OVER_NETWORK}"


def _allocate(nbytes: int) -> int:
    """Allocates `nbytes` of shared memory, and returns its file descriptor.

    All pages are allocated now: a lack of memory is an error here, and no SIGBUS in a later collective.

    Raises:
        OSError: The memory cannot be allocated.
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
    """Rank 0's part of the set-up: it makes the memory, sends it to all ranks, and tells them the outcome.

    Args:
        words: Messages of the ranks in the store.
        size: Number of ranks.
        closing: Stack that closes the sockets.
    """

    def __init__(self, words: _Rendezvous, size: int, closing: ExitStack) -> None:
        self._words = words
        self._size = size
        self._closing = closing
        self._selector = closing.enter_context(selectors.DefaultSelector())
        self._name = f"gradwire-{secrets.token_hex(16)}"
        self._lines: dict[int, _RankConnection] = {}
        self._mapped = {0}

    def open(self, block_nbytes: int, map_it: Callable[[int], native.SharedMemoryGroup]) -> native.SharedMemoryGroup:
        """Returns the group, once every rank has mapped the memory.

        Args:
            block_nbytes: Bytes of each rank's block in the memory.
            map_it: Maps the memory with this descriptor, which it owns from then on.

        Raises:
            OSError: The memory cannot be allocated.
            PeerError: A rank has exited, has failed, or did not join.
        """
        try:
            descriptor = _allocate(native.shm_segment_nbytes(self._size, block_nbytes))
        except OSError as error:
            self._words.publish(SOCKET, json.dumps({"error": error.strerror, "errno": error.errno}))
            raise
        group = map_it(descriptor)  # the group owns the descriptor from now on
        if self._size == 1:
            return group
        self._listen(f"\0{self._name}")
        offer = {"name": self._name, "network": _network(), "size": self._size, "block_nbytes": block_nbytes}
        self._words.publish(SOCKET, json.dumps(offer))
        try:
            self._hand_out(descriptor)
        except PeerError as error:
            self._send_to_all(failed=str(error), missing=error.missing)
            raise
        except BaseException as error:
            self._send_to_all(failed=f"rank 0 could not set the group up: {type(error).__name__}: {error}", missing=())
            raise
        self._send_to_all(go=True)
        return group

    def _listen(self, name: str) -> None:
        listener = self._closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(name)
        listener.listen(self._size)
        self._selector.register(listener, selectors.EVENT_READ)

    def _hand_out(self, descriptor: int) -> None:
        """Sends the descriptor to all ranks, and waits until they have mapped the memory.

        Raises:
            PeerError: A rank has exited, has failed, or did not join.
        """
        next_poll = 0.0
        poll_seconds = LONGEST_POLL_SECONDS / 8
        in_folder = False
        while len(self._mapped) < self._size:
            for key, _ in self._selector.select(poll_seconds):
                if isinstance(key.data, _RankConnection):
                    self._receive(key.data, descriptor)
                elif isinstance(key.fileobj, socket.socket):
                    self._accept(key.fileobj)
            now = time.monotonic()
            if now >= next_poll:
                poll_seconds = min(2 * poll_seconds, LONGEST_POLL_SECONDS)
                next_poll = now + poll_seconds
                self._look_for_failures()
                self._words.raise_if_failed()
                if not in_folder and (rank := self._words.find(ELSEWHERE)) is not None:
                    in_folder = True
                    self._listen_in_folder(rank)
            if now > self._words.deadline:
                raise self._words.absent([rank for rank in range(self._size) if rank not in self._mapped])

    def _accept(self, listener: socket.socket) -> None:
        """Accepts a connection; closes it if it is of another user."""
        connection = self._closing.enter_context(listener.accept()[0])
        connection.settimeout(SEND_SECONDS)
        try:
            line = _RankConnection(connection)
        except OSError as error:
            log.warning("%s", error)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _receive(self, line: _RankConnection, descriptor: int) -> None:
        """Handles what a connection has sent; closes one that sends anything but a rank's messages, and goes on.

        Raises:
            PeerError: The rank has exited.
        """
        known = next((rank for rank, each in self._lines.items() if each is line), None)
        try:
            line.feed()
            while (message := line.read()) is not None:
                known = self._answer(line, message, known, descriptor)
        except OSError as error:
            # Of the same user, but no rank, or no longer: the rank itself may still connect, or the others miss it.
            log.warning("refused a connection to a shared-memory group: %s", error)
            self._selector.unregister(line.socket)
            line.socket.close()
            if known is not None and known not in self._mapped:
                self._lines.pop(known, None)
            return
        if line.ended:
            self._selector.unregister(line.socket)
            self._look_for_failures()
            if known is not None:
                raise self._words.ended(known)

    def _answer(self, line: _RankConnection, message: Mapping[str, object], known: int | None, descriptor: int) -> int:
        """Answers a message: sends its rank the descriptor, or notes that it has mapped the memory.

        Args:
            line: Connection of the message.
            message: The message.
            known: Rank that `line` was before; None before its first message.
            descriptor: Descriptor of the memory.

        Returns:
            The rank.

        Raises:
            OSError: It is not the message of a rank, or not of this connection's rank.
        """
        rank = message.get("rank")
        if (
            not isinstance(rank, int)
            or not 0 < rank < self._size
            or known not in (None, rank)
            or (known == rank and "mapped" not in message)
        ):
            raise OSError(errno.EBADMSG, f"a message is not from a rank: {message}")
        # Invariant: a rank keeps its first connection. A later one is of another process of this user: taken in its
        # place, it would get the memory, and the rank would receive nothing more.
        if self._lines.setdefault(rank, line) is not line:
            raise OSError(errno.EISCONN, f"it is the second one for rank {rank}")
        if "mapped" in message:
            self._mapped.add(rank)
        else:
            try:
                line.send_descriptor(descriptor)
            except (BrokenPipeError, ConnectionResetError):  # it has exited since it connected
                line.ended = True
        return rank

    def _look_for_failures(self) -> None:
        """Raises a PeerError if another rank has published an error."""
        if (failed := self._words.find(FAILED)) is not None:
            raise PeerError(failed)

    def _listen_in_folder(self, rank: str) -> None:
        """Listens at a socket in a folder as well, because `rank` is in another network namespace."""
        path = FOLDER / f"{self._name}.sock"
        log.info("rank %s is in another network namespace: the ranks of its node meet at %s", rank, path)
        _sweep()
        self._closing.callback(path.unlink, missing_ok=True)
        self._listen(str(path))
        self._words.publish(FOLDER_SOCKET, str(path))

    def _send_to_all(self, **message: object) -> None:
        """Sends the outcome of the set-up to all connected ranks."""
        for rank, line in self._lines.items():
            try:
                line.send(**message)
            except OSError as error:  # it has exited: the first collective will show it
                log.debug("rank %d cannot be told how the set-up has ended: %s", rank, error)


def _join(
    words: _Rendezvous,
    rank: int,
    size: int,
    block_nbytes: int,
    closing: ExitStack,
    map_it: Callable[[int], native.SharedMemoryGroup],
) -> native.SharedMemoryGroup:
    """Joins the group as another rank than 0: receives the memory, maps it, and waits for the outcome.

    Args:
        words: Messages of the ranks in the store.
        rank: This rank in the group.
        size: Number of ranks; must be the same on rank 0.
        block_nbytes: Bytes of each rank's block; must be the same on rank 0.
        closing: Stack that closes the sockets.
        map_it: Maps the memory with this descriptor, which it owns from then on.

    Raises:
        PeerError: A rank has exited, has failed, or did not join.
        OSError: Rank 0 cannot allocate the memory.
        ValueError: `size` or `block_nbytes` differs from rank 0's.
    """
    # Read rank 0's offer, and compare the arguments.
    offer = _OFFER.read(words.wait_for(SOCKET))
    if isinstance(offer, _NoOffer):
        raise PeerSystemError(offer.errno, f"rank 0 {offer.error}")
    for name, own, theirs in (("size", size, offer.size), ("block_nbytes", block_nbytes, offer.block_nbytes)):
        if theirs != own:
            raise ValueError(f"`{name}` is {own} here and {theirs} on rank 0: all ranks must pass the same value")
    # Connect: to the abstract socket, or from another network namespace to one in the folder.
    connection = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    if offer.network == _network():
        place = f"\0{offer.name}"
    else:
        words.publish(ELSEWHERE, str(rank))
        place = words.wait_for(FOLDER_SOCKET)
    # Receive and map the memory, and wait until rank 0 says that all ranks have done so.
    deadline = words.deadline + LATE_SECONDS
    # Of a Unix socket this is also the time to connect, if rank 0 does not accept and its queue is full.
    wait = struct.pack("ll", max(1, math.ceil(deadline - time.monotonic())), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    try:
        connection.connect(place)
        line = _RankConnection(connection)
        line.send(rank=rank)
        descriptor = line.receive_descriptor(deadline)
        group = None
        if descriptor is not None:
            group = map_it(descriptor)
            line.send(rank=rank, mapped=True)
        outcome = line.receive(deadline)
    except (TimeoutError, BlockingIOError) as error:
        raise words.absent([0]) from error
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, FileNotFoundError) as error:
        raise words.ended(0) from error
    if outcome is None:
        raise words.ended(0)
    if "go" not in outcome or group is None:
        missing = outcome.get("missing", ())
        assert isinstance(missing, Sequence)
        raise PeerError(str(outcome["failed"]), tuple(each for each in missing if each < size))
    return group


def _network() -> str:
    """Returns an id of this process's network namespace, outside of which its abstract sockets are not visible."""
    try:
        facts = Path("/proc/self/ns/net").stat()
    except OSError as error:  # without /proc all ranks are taken to share one
        log.debug("this process's network namespace is not known: %s", error)
        return ""
    return f"{facts.st_dev}.{facts.st_ino}"


def _sweep() -> None:
    """Removes sockets in the folder whose processes were killed while they listened."""
    for path in FOLDER.glob("gradwire-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                facts = path.stat()
                if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.getuid():
                    probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.debug("%s cannot be checked: %s", path, error)


def open_group(
    store: Store,
    rank: int,
    size: int,
    key: str,
    timeout: timedelta,
    block_nbytes: int,
    peer_wait: PeerWait | None = None,
) -> native.SharedMemoryGroup:
    """Maps new shared memory in all ranks; returns when every rank has mapped it.

    Args:
        store: Store that all ranks of the group share.
        rank: This rank's index.
        size: Number of ranks.
        key: Name of the group in the store.
        timeout: Longest wait for the set-up, and time-out of collectives.
        block_nbytes: Bytes of one staging block.
        peer_wait: Liveness check of the ranks; None disables it.

    Raises:
        OSError: The memory cannot be allocated, here or on rank 0.
        ValueError: A rank disagrees about `size` or `block_nbytes`.
        PeerError: A rank did not join in time, has exited, or has failed.
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
