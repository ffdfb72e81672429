"""Detection of ranks that run their models in different orders, which otherwise look like stragglers.

Each hooked model has a communicator, a stall watch and a store prefix of its own. So the watch of one model sees only
that the other rank has not reached a bucket, and not that it waits in another model. Each waiting rank therefore
publishes its wait under a prefix that all communicators of a job share.

Pairs of ranks suffice: a rank that waits in a model waits for every rank of it that has not reached the bucket, so of
ranks that run the same models in different orders, two always wait for each other.
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
    """The part of a stall watch that is needed here."""

    @property
    def launches(self) -> int:
        """Number of all-reduces that this rank has started in the watched model."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of a rank in a model.

    Attributes:
        generation: Name of the communicator's generation; the same on all of its ranks.
        model: Place of the model among those that the rank has hooked, from 0.
        number: Number of the launch in which it waits, from 0.
        bucket: Bucket of that launch, with its parameters.
    """

    generation: str
    model: int
    number: int
    bucket: str


_WAIT: MessageType[Wait] = MessageType(Wait)
_models: dict[int, "count[int]"] = {}
"""Rank in the default group -> counter of the models that it has hooked."""
_watches: "WeakValueDictionary[tuple[str, int], CountsLaunches]" = WeakValueDictionary()
"""(Name of the communicator's generation, rank in the default group) -> stall watch of this process."""


class Waits:
    """Waits of one rank in one model, as it publishes them to the other ranks of the job.

    From them a stall watch finds two ranks that wait for each other in different models, as ranks that run their models
    in different orders do (`find_disorder`); to the watch of one model, such a rank looks like a straggler.

    Thread safety: none. The thread of the model's stall watch calls it.

    Args:
        store: Store that all communicators of the job share.
        generation: Name of the generation of the model's communicator.
        rank: This rank in the default group.
    """

    def __init__(self, store: Store, generation: str, rank: int) -> None:
        self._store = store
        self._generation = generation
        self._rank = rank
        self._model = next(_models.setdefault(rank, count()))
        self._published: Wait | None = None

    def register(self, watch: CountsLaunches) -> None:
        """Registers the stall watch of this model, so that those of other models can ask for its launches."""
        _watches[self._generation, self._rank] = watch

    def publish(self, number: int, bucket: str) -> None:
        """Publishes that this rank waits in a launch of this model, in place of its previous wait in any model.

        Args:
            number: Number of the launch, from 0.
            bucket: Bucket of the launch in words, with its parameters.
        """
        wait = Wait(self._generation, self._model, number, bucket)
        if wait != self._published:
            self._store.set(str(self._rank), json.dumps(asdict(wait)))
            self._published = wait

    def withdraw(self) -> None:
        """Deletes the published wait, unless one in another model has replaced it."""
        wait, self._published = self._published, None
        if wait is not None and self._of(self._rank) == wait:
            self._store.delete_key(str(self._rank))

    def find_disorder(self, late: Sequence[int]) -> str | None:
        """Returns a sentence about two ranks that wait for each other in different models; None if there are none.

        Args:
            late: Ranks in the default group for which this rank waits.
        """
        own = self._published
        for rank in late:
            other = self._of(rank)
            if own is None or other is None or other.generation == own.generation:
                continue
            # None if the other wait is from an earlier generation, or in a model that this rank does not have.
            watch = _watches.get((other.generation, self._rank))
            # The other rank waits for this one only if this one has not started that launch.
            if watch is not None and watch.launches <= other.number:
                (one, first), (two, second) = sorted({self._rank: own, rank: other}.items())
                return (
                    f"rank {one} waits in {first.bucket} of model {first.model}, rank {two} in {second.bucket} of "
                    f"model {second.model}: the ranks run their models in another order"
                )
        return None

    def _of(self, rank: int) -> Wait | None:
        """Returns the wait that a rank of the default group has published; None without one."""
        key = str(rank)
        return _WAIT.read(self._store.get(key)) if self._store.check([key]) else None
