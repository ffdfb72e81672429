"""How the ranks of a node come to share one file in /dev/shm, all of them or none, and leave no file behind."""

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from gradwire._native import SharedMemoryGroup, shm_segment_nbytes
from gradwire.comms.errors import PeerError

FOLDER = Path("/dev/shm")
"""Where Linux mounts a tmpfs for shared memory (man 7 shm_overview)."""

SHORTEST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.05
"""Between two looks into the store: a question to a TCPStore takes some 0.1 ms of its one thread."""

FAILED = "failed"


class _Rendezvous:
    """The store, seen as one set of words that the ranks of one group leave for each other."""

    def __init__(self, store: Store, key: str, deadline: float) -> None:
        self._store = store
        self._key = key
        self._deadline = deadline

    def say(self, word: str, value: str) -> None:
        self._store.set(f"{self._key}/{word}", value)

    def has(self, word: str) -> bool:
        return bool(self._store.check([f"{self._key}/{word}"]))

    def fail(self, message: str) -> None:
        """Gives the reason to every rank that listens now or later; the store itself may be what has failed."""
        with suppress(RuntimeError):  # our own error is the one to report
            self.say(FAILED, message)

    def hear(self, word: str, missing: Callable[[], tuple[int, ...]]) -> str:
        """Polls for a word, and for another rank's failure.

        A `wait` of the store's own, cut into slices, would make TCPStore log every slice.

        Raises:
            PeerError: A rank has failed, or the deadline has passed: names the ranks that `missing()` returns.
        """
        pause_seconds = SHORTEST_PAUSE_SECONDS
        while not self.has(word):
            if self.has(FAILED):
                if self.has(word):  # it came before the failure, and says more
                    break
                raise PeerError(self._store.get(f"{self._key}/{FAILED}").decode())
            if time.monotonic() > self._deadline:
                absent = missing()
                raise PeerError(
                    f"ranks {absent} did not come to the set-up of the shared-memory group {self._key!r} "
                    "within `timeout`",
                    absent,
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
        return str(self._store.get(f"{self._key}/{word}").decode())


def _allocate(path: Path, nbytes: int) -> None:
    """Makes a file of `nbytes` that is really there: a tmpfs too small fails here and not with SIGBUS later.

    Raises:
        OSError: With what was found, what was wanted and what to do.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot make a shared-memory file in {path.parent}: {error.strerror}; the folder "
            "must exist and be writable for this user (mode 1777)",
        ) from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        facts = os.statvfs(path.parent)
        path.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"cannot allocate shared memory: {error.strerror}; {path.parent} has "
            f"{facts.f_bavail * facts.f_frsize} bytes free, wanted {nbytes}: enlarge it (docker run "
            "--shm-size=1g, mount -o remount,size=1g) or pass a smaller `block_nbytes`",
        ) from error
    finally:
        os.close(descriptor)


def _offer(words: _Rendezvous, size: int, block_nbytes: int) -> Path:
    """Rank 0's part: makes the file. Its name is published first, so that survivors can unlink it if we die."""
    path = FOLDER / f"gradwire-{secrets.token_hex(16)}"
    words.say("path", str(path))
    try:
        _allocate(path, shm_segment_nbytes(size, block_nbytes))
    except OSError as error:
        words.say("made", json.dumps({"error": error.strerror, "errno": error.errno}))
        raise
    words.say("made", json.dumps({"size": size, "block_nbytes": block_nbytes}))
    return path


def _check_offer(words: _Rendezvous, size: int, block_nbytes: int) -> None:
    """The other ranks' part: waits for the file, and compares what rank 0 made it for with our own arguments."""
    made = json.loads(words.hear("made", lambda: (0,)))
    if "error" in made:
        raise OSError(made["errno"], f"rank 0 {made['error']}")
    for name, own in (("size", size), ("block_nbytes", block_nbytes)):
        if made[name] != own:
            raise ValueError(f"`{name}` is {own} here and {made[name]} on rank 0: all ranks must pass the same value")


def open_group(
    store: Store, rank: int, size: int, key: str, timeout: timedelta, block_nbytes: int
) -> SharedMemoryGroup:
    """Maps one new segment in all ranks; returns when every rank has mapped it and its name is gone.

    Raises:
        OSError: /dev/shm is missing, too small or not writable, here or on another rank.
        ValueError: A rank disagrees about `size` or `block_nbytes`, here or elsewhere.
        PeerError: A rank did not join in time.
    """
    words = _Rendezvous(store, key, time.monotonic() + timeout.total_seconds())
    path: Path | None = None
    try:
        if rank == 0:
            path = _offer(words, size, block_nbytes)
        else:
            path = Path(words.hear("path", lambda: (0,)))
            _check_offer(words, size, block_nbytes)
        native = SharedMemoryGroup(str(path), rank, size, block_nbytes, timeout.total_seconds())
        words.say(f"rank{rank}", "mapped")
        for peer in range(size):
            words.hear(f"rank{peer}", lambda: tuple(rank for rank in range(size) if not words.has(f"rank{rank}")))
    except PeerError:
        raise
    except BaseException as error:
        words.fail(f"rank {rank} could not join the shared-memory group {key!r}: {type(error).__name__}: {error}")
        raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return native
