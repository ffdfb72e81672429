"""When a rank is lost: every survivor says which rank is missing and in which phase, within seconds.

A dead rank cannot speak, so the survivors do: each one that sees a collective fail publishes that it is alive and what
it saw, waits a moment for the others to do the same, and names those that said nothing.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import Any

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.liveness import LOOK_SECONDS, OverdueError, has_ended, look_seconds, publish_process
from gradwire.comms.errors import PeerError
from gradwire.comms.lanes import Lane

log = logging.getLogger("gradwire")

PATIENCE = timedelta(seconds=15)
"""How long survivors wait for the others' word, besides the time between two looks at the board. Most look once a
second; the rest is for busy machines."""

CALLING_AFTER = timedelta(seconds=2)
"""Then a rank that is still silent is called at the port of its liveness ring, or of its process: of a node that is
lost as a whole, neighbours name some ranks, and this the others."""

NAP_SECONDS = 0.05
"""Between two looks of a rank that collects the others' words; for the others the first of ever longer ones."""


class CollectiveError(RuntimeError):
    """A collective failed. `missing` holds the ranks that are gone, as far as the survivors know."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class FailureBoard:
    """Where the survivors of one group leave their word, or those of several groups that wait for each other.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        size: Number of ranks.
        everybody: Gives the ranks that may be missing; None: all of them. Asked when something has failed.
    """

    def __init__(
        self, store: Store, rank: int, size: int, everybody: Callable[[], Iterable[int]] | None = None
    ) -> None:
        self.rank = rank
        self._store = store
        self._size = size
        self._everybody = everybody or (lambda: range(size))
        self._group: Sequence[int] = range(size)
        self._store_is_gone = False

    def of_group(self, ranks: Sequence[int]) -> "FailureBoard":
        """The same board for one of several groups.

        Args:
            ranks: The board's number of each of the group's ranks.
        """
        board = copy(self)
        board._group = tuple(ranks)
        return board

    def publish(self) -> None:
        """Says where others find out whether this process has ended."""
        publish_process(self._store, self.rank)

    def alarm(self) -> str | None:
        """Why another rank has given up; None while none has, or where the store is gone (connections break then)."""
        if self._store_is_gone:  # it stays so, and torch logs the whole stack for every question
            return None
        try:
            if not self._store.check(["alarm"]):
                return None
            return self._store.get("alarm").decode()
        except RuntimeError as error:
            self._store_is_gone = True
            log.debug("the store cannot be asked for alarms any more: %s", error)
            return None

    def warn(self, reason: str) -> None:
        """Raises the alarm, and waits for nobody: the other ranks give up with this reason."""
        try:
            self._store.compare_set("alarm", "", reason)
        except RuntimeError as error:
            log.debug("the store was gone before rank %d could raise the alarm: %s", self.rank, error)

    def diagnose(
        self,
        error: BaseException,
        lane: Lane,
        phase: str,
        members: Sequence[int],
        *,
        launches: int = 0,
        waiting: bool = True,
    ) -> CollectiveError:
        """Publishes this rank's word, listens to the others, and says what happened.

        Args:
            error: What the transport raised.
            lane: Where it happened.
            phase: The phase in words: `all_reduce inter_node`.
            members: Ranks, as the group numbers them, of what failed in it, where known.
            launches: How many launches this rank has started, where all ranks say so.
            waiting: Whether its device waits for others. After a time-out one that does not, and has started fewer
                launches than another one, is the rank that did not come.

        Returns:
            The error for every future of this rank; within `PATIENCE` where ranks are silent, else as soon as all have
            published what they saw.
        """
        missing_of = error.missing if isinstance(error, PeerError) and members else ()
        dead = {self._group[members[index]] for index in missing_of}
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        overdue = isinstance(error, OverdueError)
        word = {"dead": sorted(dead), "phase": phase, "launches": launches, "waiting": waiting, "overdue": overdue}
        try:
            missing = tuple(sorted(self._listen(word, cause) - {self.rank}))
        except RuntimeError as store_error:
            reason = str(store_error).splitlines()[0]
            return CollectiveError(
                f"{phase} failed on rank {self.rank} ({cause}), and the store cannot be reached to ask "
                f"who is missing ({reason}): the process that serves the store is gone",
                tuple(sorted(dead)),
            )
        if missing:
            who = f"rank {', '.join(map(str, missing))} of {self._size} is missing"
        else:
            who = f"all {self._size} ranks are alive"
        return CollectiveError(f"{phase} failed on rank {self.rank}: {who}. Cause: {cause}", missing)

    def _listen(self, word: dict[str, object], cause: str) -> set[int]:
        """The ranks that are missing.

        The first rank to come collects all words and publishes the verdict, which the others wait for: if
        everybody collected, the store would be asked as many questions as there are pairs of ranks.
        """
        alarm = f"rank {self.rank} saw {word['phase']} fail: {cause}"
        self._store.set(f"word/{self.rank}", json.dumps(word))
        self._store.compare_set("alarm", "", alarm)
        first = int(self._store.compare_set("collector", "", str(self.rank))) == self.rank
        deadline = time.monotonic() + PATIENCE.total_seconds() + look_seconds(self._size)
        if not first:
            nap_seconds = NAP_SECONDS
            while not self._store.check(["verdict"]) and time.monotonic() < deadline + LOOK_SECONDS:
                time.sleep(nap_seconds)
                nap_seconds = min(2 * nap_seconds, look_seconds(self._size))
            if self._store.check(["verdict"]):
                return set(json.loads(self._store.get("verdict")))
        missing = self._collect(word, deadline)
        self._store.set("verdict", json.dumps(sorted(missing)))
        return missing

    def _collect(self, own: dict[str, Any], deadline: float) -> set[int]:
        words, silent, dead = {self.rank: own}, set(self._everybody()) - {self.rank}, set(own["dead"])
        calling = time.monotonic() + CALLING_AFTER.total_seconds() + look_seconds(self._size)
        while True:
            for rank in sorted(silent):
                if self._store.check([f"word/{rank}"]):
                    silent.discard(rank)
                    words[rank] = json.loads(self._store.get(f"word/{rank}"))
                    dead |= set(words[rank]["dead"])
            if time.monotonic() > calling:
                calling = deadline + 1.0
                dead |= {rank for rank in sorted(silent - dead) if has_ended(self._store, rank)}
            if not silent - dead or time.monotonic() > deadline:
                break
            time.sleep(NAP_SECONDS)
        if dead or silent or not any(each["overdue"] for each in words.values()):
            return dead | silent
        most = max(each["launches"] for each in words.values())
        return {rank for rank, each in words.items() if each["launches"] < most and not each["waiting"]}
