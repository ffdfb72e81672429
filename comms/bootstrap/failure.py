"""When a rank is lost: every survivor says which rank is missing and in which phase, within seconds.

A dead rank cannot speak, so the survivors do: each one that sees a collective fail publishes that it is alive and what
it saw, waits a moment for the others to do the same, and names those that said nothing.
"""

import json
import time
from collections.abc import Sequence
from datetime import timedelta

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.errors import PeerError
from gradwire.comms.lanes import Lane

PATIENCE = timedelta(seconds=15)
"""How long a survivor waits for the others' word. They read the board once a second; the rest is for busy machines."""


class CollectiveError(RuntimeError):
    """A collective failed. `missing` holds the ranks that are gone, as far as the survivors know."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class FailureBoard:
    """Where the survivors of one group leave their word.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def alarm(self) -> str | None:
        """Why another rank has given up; None while none has, or where the store is gone (connections break then)."""
        try:
            if not self._store.check(["alarm"]):
                return None
            return self._store.get("alarm").decode()
        except RuntimeError:
            return None

    def diagnose(self, error: BaseException, lane: Lane, phase: str, members: Sequence[int]) -> CollectiveError:
        """Publishes this rank's word, listens to the others, and says what happened.

        Args:
            error: What the transport raised.
            lane: Where it happened.
            phase: The phase in words: `all_reduce inter_node`.
            members: Global ranks of the group that failed, where known.

        Returns:
            The error for every future of this rank; within `PATIENCE` where ranks are silent, else as soon as all have
            published what they saw.
        """
        dead = {members[index] for index in error.missing} if isinstance(error, PeerError) and members else set()
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            silent, reported_dead = self._listen(sorted(dead), phase)
        except RuntimeError as store_error:
            reason = str(store_error).splitlines()[0]
            return CollectiveError(
                f"{phase} failed on rank {self._rank} ({cause}), and the store cannot be reached to ask "
                f"who is missing ({reason}): the process that serves the store is gone",
                tuple(sorted(dead)),
            )
        missing = tuple(sorted(dead | silent | reported_dead))
        if missing:
            who = f"rank {', '.join(map(str, missing))} of {self._size} is missing"
        else:
            who = f"all {self._size} ranks are alive"
        return CollectiveError(f"{phase} failed on rank {self._rank}: {who}. Cause: {cause}", missing)

    def _listen(self, dead: list[int], phase: str) -> tuple[set[int], set[int]]:
        self._store.set("alarm", f"rank {self._rank} saw {phase} fail")
        self._store.set(f"word/{self._rank}", json.dumps({"dead": dead, "phase": phase}))
        silent = set(range(self._size)) - {self._rank}
        reported_dead: set[int] = set(dead)
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while silent - reported_dead and time.monotonic() < deadline:
            for rank in sorted(silent):
                if self._store.check([f"word/{rank}"]):
                    silent.discard(rank)
                    reported_dead |= set(json.loads(self._store.get(f"word/{rank}"))["dead"])
            time.sleep(0.05)
        return silent, reported_dead
