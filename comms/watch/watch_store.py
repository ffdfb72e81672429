"""What ranks leave for each other in the store of the default group: statuses, questions, and answers."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from gradwire.comms.bootstrap.compat import PrefixStore, Store, clone_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.messages import MessageError, MessageType, Rank
from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.rank import RankStatus

log = logging.getLogger("gradwire")

ANSWER_TIMEOUT = timedelta(seconds=2)
"""The answer timeout for every question to the store: a watch never waits for it longer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a rank runs, and the ranks of each of its groups."""

    host: str
    members: Mapping[str, tuple[Rank, ...]]


_MEMBER: MessageType[_Member] = MessageType(_Member, most_nbytes=1 << 24)
_STATUS: MessageType[RankStatus] = MessageType(RankStatus, most_nbytes=1 << 24)
_ANSWER: MessageType[dict[str, list[IssuedCollective]]] = MessageType(
    dict[str, list[IssuedCollective]], most_nbytes=1 << 26
)
_TIMELINE: MessageType[TimelinePart] = MessageType(TimelinePart, most_nbytes=1 << 26)

ASKED, CONCLUDED, TIMELINES = "asked", "concluded", "timelines"


class WatchStore:
    """One rank's client of the store that all ranks of a watch share.

    Args:
        store: Of the default group.
        rank: This rank.
        size: Of the default group.

    Every call may raise `RuntimeError` where the store is gone or silent.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # A connection of its own: the training thread may wait in the other one.
        self._store = PollingStore(PrefixStore("gradwire/watch", clone_of(store)), ANSWER_TIMEOUT)
        self.rank = rank
        self._size = size

    def say(self, status: RankStatus) -> None:
        """Leaves this rank's status in place of its last one."""
        self._put("status", asdict(status))

    def introduce(self, members: Mapping[str, Sequence[int]], host: str) -> None:
        """Says which groups this rank is in, and where it runs."""
        self._put("member", {"host": host, "members": members})

    def introductions(self) -> dict[int, tuple[str, dict[str, tuple[int, ...]]]]:
        """Rank -> (host, its groups), of the ranks that have said so."""
        return {rank: (found.host, dict(found.members)) for rank, found in self._read("member", _MEMBER).items()}

    def statuses(self) -> dict[int, RankStatus]:
        """The newest status of each rank that has spoken."""
        return self._read("status", _STATUS)

    def ask(self) -> int:
        """Asks all ranks for their last collectives.

        Returns:
            The question's number; that of another rank's where it is still open.
        """
        last = self.asked()
        return last if last and not self.concluded(last) else self._store.add(ASKED, 1)

    def asked(self) -> int:
        """The number of the last question; 0 before the first."""
        return self._store.add(ASKED, 0)

    def answer(self, question: int, issued: Mapping[str, Sequence[IssuedCollective]]) -> None:
        """Leaves this rank's last collectives."""
        self._put(f"answer/{question}", {name: [asdict(each) for each in some] for name, some in issued.items()})

    def answers(self, question: int) -> dict[int, dict[str, list[IssuedCollective]]]:
        """Rank -> group's name -> its last collectives, of the ranks that have answered."""
        return self._read(f"answer/{question}", _ANSWER)

    def ask_for_timelines(self) -> int:
        """Asks all ranks for the times of their last collectives; the question's number."""
        return self._store.add(TIMELINES, 1)

    def timelines_asked(self) -> int:
        """The number of the last such question; 0 before the first."""
        return self._store.add(TIMELINES, 0)

    def leave_timeline(self, part: TimelinePart) -> None:
        """Leaves this rank's times in place of its last ones."""
        self._put("timeline", asdict(part))

    def timelines(self, question: int) -> dict[int, TimelinePart]:
        """Rank -> its times, of the ranks that have answered this question."""
        return {rank: part for rank, part in self._read("timeline", _TIMELINE).items() if part.question == question}

    def conclude(self, question: int) -> None:
        """Says that the answers to a question, and to those before it, have been judged."""
        self._store.set(CONCLUDED, str(question))

    def concluded(self, question: int) -> bool:
        """Whether they have."""
        return self._store.check([CONCLUDED]) and int(self._store.read(CONCLUDED)) >= question

    def _put(self, kind: str, found: object) -> None:
        self._store.set(f"{kind}/{self.rank}", json.dumps(found))

    def _read(self, kind: str, message: MessageType[T]) -> dict[int, T]:
        """What the ranks have left that have left something; what cannot be read counts for nothing."""
        keys = [f"{kind}/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            said = dict(enumerate(self._store.multi_get(keys)))
        else:
            said = {rank: self._store.read(key) for rank, key in enumerate(keys) if self._store.check([key])}
        found = {}
        for rank, text in said.items():
            try:
                found[rank] = message.read(text)
            except MessageError as error:
                log.debug("what rank %d has left as %s cannot be read: %s", rank, kind, error)
        return found
