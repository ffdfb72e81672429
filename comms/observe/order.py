"""Tells a rank that is late from one that waits in another model: ranks that run their models in another order.

Each hooked model has a communicator, a stall watch and a store prefix of its own, so that the watch of one model sees
only that the other rank has not come. A rank that waits therefore leaves one word under a prefix that all communicators
of a job share.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.boundary.messages import MessageType


class CountsLaunches(Protocol):
    """A stall watch, as far as it is asked here."""

    @property
    def launches(self) -> int:
        """The number of all-reduces that this rank has started in the watched model."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank of the job waits in.

    Attributes:
        start: The name of its communicator's start; the same on all of its ranks.
        model: The place of the model among those that the rank has hooked, from 0.
        number: The launch that it waits in.
        bucket: The bucket of that launch, in words.
    """

    start: str
    model: int
    number: int
    bucket: str


_WAIT: MessageType[Wait] = MessageType(Wait)
_models: dict[int, "count[int]"] = {}
_watches: "WeakValueDictionary[tuple[str, int], CountsLaunches]" = WeakValueDictionary()
"""The living watches of this process, by their communicator's start and the rank in the default group."""


class Waits:
    """What one rank tells the job of its waits in one model, and what it hears of other ranks' waits.

    Args:
        store: A store that all communicators of the job share.
        start: The name of the communicator's start.
        rank: This rank in the default group.
    """

    def __init__(self, store: Store, start: str, rank: int) -> None:
        self._store = store
        self._start = start
        self._rank = rank
        self._model = next(_models.setdefault(rank, count()))
        self._said: Wait | None = None

    def know(self, watch: CountsLaunches) -> None:
        """Notes which watch of this process looks at the model's launches."""
        _watches[self._start, self._rank] = watch

    def say(self, number: int, bucket: str) -> None:
        """Tells the job that this rank waits in a launch of this model; the latest word of a rank counts."""
        said = Wait(self._start, self._model, number, bucket)
        if said != self._said:
            self._store.set(str(self._rank), json.dumps(asdict(said)))
            self._said = said

    def take_back(self) -> None:
        """Removes the word, unless one about another model has taken its place."""
        said, self._said = self._said, None
        if said is not None and self._of(self._rank) == said:
            self._store.delete_key(str(self._rank))

    def disorder(self, late: Sequence[int]) -> str | None:
        """Says that a rank waits for this one in another model, if one that this rank waits for does.

        Args:
            late: Ranks in the default group that this rank waits for.

        Returns:
            The sentence; None where the ranks' order is not what is wrong.
        """
        own = self._said
        for rank in late:
            other = self._of(rank)
            if own is None or other is None or other.start == own.start:
                continue
            watch = _watches.get((other.start, self._rank))  # None: of an earlier start, or not of this rank's models
            if watch is not None and watch.launches <= other.number:
                (one, first), (two, second) = sorted({self._rank: own, rank: other}.items())
                return (
                    f"rank {one} waits in {first.bucket} of model {first.model}, rank {two} in {second.bucket} of "
                    f"model {second.model}: the ranks run their models in another order"
                )
        return None

    def _of(self, rank: int) -> Wait | None:
        key = str(rank)
        return _WAIT.read(self._store.get(key)) if self._store.check([key]) else None
