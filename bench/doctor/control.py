"""Messages between the ranks of the doctor, through the launcher's store and in small pieces.

gloo and NCCL are not used, because the doctor examines whether they connect. The pieces are small enough to arrive even
if packets of full size are lost, which is one of the faults that the doctor looks for.
"""

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from gradwire.bench.doctor.arrival import KEY
from gradwire.comms.bootstrap.compat import PrefixStore, Store
from gradwire.comms.boundary.messages import COUNT, MessageError, MessageType, inflated, parsed

MOST_NBYTES = 1 << 26
"""Upper limit of one message, in bytes."""


@dataclass(frozen=True, slots=True)
class _Started:
    """Message that a rank leaves in the store before it imports torch, which can take minutes; see `StartNotice`.

    Attributes:
        host: Hostname of the rank's node.
        time: Time of day at the rank's start, in seconds since 1970.
    """

    host: str
    time: float = 0.0


_STARTED: MessageType[_Started] = MessageType(_Started)

PIECE_NBYTES = 1000
"""Bytes of a piece: with all headers below 1280, the smallest MTU that IPv6 allows. Source: RFC 8200, section 5."""


Late = Callable[[list[int], float], None]
"""Callback with (ranks that have not joined, seconds since the wait began)."""


class Control:
    """Messages between the ranks of a job through a store.

    Args:
        store: Store that all ranks reach.
        rank: This rank.
        size: Number of ranks.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        store: Store that all ranks reach.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self._said = 0
        self._store = PrefixStore("doctor-words", store)

    def arrive(self, timeout: timedelta, late: Late = lambda missing, seconds: None) -> list[int]:
        """Reports that this rank has joined; on rank 0, also waits for the others.

        Args:
            timeout: Time limit of rank 0 for all ranks to join.
            late: Callback on rank 0, once a second, with the ranks that have not joined and the seconds waited.

        Returns:
            On rank 0 the ranks that did not join within `timeout`; empty on the others.
        """
        self._store.set(f"here/{self.rank}", "1")
        if self.rank != 0:
            return []
        began = said = time.monotonic()
        missing = list(range(self.size))
        while missing and time.monotonic() < began + timeout.total_seconds():
            missing = [rank for rank in missing if not self._store.check([f"here/{rank}"])]
            if missing and time.monotonic() > said + 1.0:
                said = time.monotonic()
                late(missing, said - began)
            time.sleep(0.02 if missing else 0)
        return missing

    def started(self, ranks: Sequence[int]) -> dict[int, str]:
        """Looks up which of the given ranks have started, even if they still import torch; see `StartNotice`.

        Args:
            ranks: Ranks to look up.

        Returns:
            Rank -> hostname, for each rank that has left a readable message in the store; others are left out.
        """
        keys = {rank: f"{KEY}/{rank}" for rank in ranks}
        said = {rank: self.store.get(key) for rank, key in keys.items() if self.store.check([key])}
        found = {}
        for rank, word in said.items():
            with contextlib.suppress(MessageError):  # who says nothing that can be read has not been heard of
                found[rank] = _STARTED.read(word).host
        return found

    def gather(self, own: object, timeout: timedelta) -> list[object] | None:
        """Gathers a value of every rank on rank 0. Collective.

        Args:
            own: Value of this rank, of types that JSON has.
            timeout: Time limit for each rank.

        Returns:
            Values by rank on rank 0; None on the others.

        Raises:
            RuntimeError: A rank sent nothing in time, or something that cannot be parsed.
        """
        number = self._next()
        self._write(f"{number}/{self.rank}", own)
        if self.rank != 0:
            return None
        return [self._read(f"{number}/{rank}", timeout) for rank in range(self.size)]

    def broadcast(self, what: object, timeout: timedelta) -> object:
        """Broadcasts a value from rank 0 to all ranks. Collective.

        Args:
            what: Value on rank 0, of types that JSON has; ignored on the others.
            timeout: Time limit for rank 0.

        Returns:
            Value of rank 0.

        Raises:
            RuntimeError: Rank 0 sent nothing in time, or something that cannot be parsed.
        """
        number = self._next()
        if self.rank == 0:
            self._write(f"{number}/0", what)
            return what
        return self._read(f"{number}/0", timeout)

    def barrier(self, timeout: timedelta) -> None:
        """Waits until all ranks have called this. Collective.

        Args:
            timeout: Time limit for all ranks.

        Raises:
            RuntimeError: A rank has not called it in time.
        """
        self.gather(None, timeout)
        self.broadcast(None, timeout)

    def _next(self) -> int:
        """Returns the number of the next message, the same on all ranks as they make the same calls in one order."""
        self._said += 1
        return self._said

    def _write(self, key: str, what: object) -> None:
        """Writes a value to the store: compressed JSON in pieces, then the number of pieces, which readers wait for."""
        text = zlib.compress(json.dumps(what).encode())
        pieces = [text[start : start + PIECE_NBYTES] for start in range(0, len(text), PIECE_NBYTES)]
        for place, piece in enumerate(pieces):
            self._store.set(f"{key}/{place}", piece)  # type: ignore[arg-type]
        self._store.set(f"{key}/pieces", str(len(pieces)))

    def _read(self, key: str, timeout: timedelta) -> object:
        """Waits for a value that another rank writes with `_write`, and returns it.

        Raises:
            RuntimeError: It did not come in time, is too long, or cannot be parsed.
        """
        self._store.wait([f"{key}/pieces"], timeout)
        try:
            count = COUNT.read(self._store.get(f"{key}/pieces"))
            if count > MOST_NBYTES // PIECE_NBYTES:
                raise MessageError(f"{count} pieces; wanted at most {MOST_NBYTES // PIECE_NBYTES}")
            packed = b"".join(self._store.get(f"{key}/{place}") for place in range(count))
            return parsed(inflated(packed, MOST_NBYTES), most_nbytes=MOST_NBYTES, finite=False)
        except MessageError as error:
            raise RuntimeError(f"a rank says what cannot be read: {error}") from None


def spread(rounds: Sequence[list[tuple[int, int]]], most: int) -> list[list[tuple[int, int]]]:
    """Returns at most `most` of the rounds, evenly spaced among them.

    Args:
        rounds: Rounds of pairwise measurements: pairs of nodes that are measured at the same time.
        most: Upper limit of the number of rounds.
    """
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[place * len(rounds) // most] for place in range(most)]
