"""How ranks agree, once they know who they are: every rank says something, rank 0 decides, every rank follows.

`decide` is all there is; the rest says what the decision is: the words of all (`gather`), that they are the same
(`same`), or what differs (`compare`). It goes through the store, for what is decided seldom and must fail alike on all
ranks. What is not decided here: who the ranks are (rendezvous.py), what a grid of ranks wants of which each knows its
row and column alone (sharded/agreement.py), who is left (elastic/membership.py); numbers of every step travel with the
gradients, through no store (observe/share.py).
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Literal, TypeVar, cast

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.probe import MOST_PROBES, Backoff, FindExited
from gradwire.comms.bootstrap.store import Naps, PollingStore, StoreUnreachableError
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.errors import PeerError

log = logging.getLogger("gradwire")

T = TypeVar("T")

REFUSED = "refused"

MOST_NBYTES = 1 << 28
"""Bytes that a rank says at most: the shapes of a model's parameters."""

_VALUE: MessageType[object] = MessageType(object, most_nbytes=MOST_NBYTES, finite=False)
_DECIDED: MessageType[tuple[str, object]] = MessageType(
    tuple[Literal["accepted", "refused"], object], most_nbytes=MOST_NBYTES, finite=False
)
"""Any value of JSON: whoever has asked knows what it means. A rule may use infinity for what is not known."""
_FACTS: MessageType[tuple[tuple[str, str], ...]] = MessageType(tuple[tuple[str, str], ...], most_nbytes=MOST_NBYTES)

BLOCK = 512
"""Values that rank 0 reads in one question."""

GRACE = timedelta(seconds=5)
"""The grace for the rank that has given up first to say who is missing, beyond what ranks wait between two looks."""


class Agreement:
    """One rank's voice. Every rank makes one with the same name and calls the same methods in the same order.

    Args:
        store: A store that all ranks share.
        rank: This rank.
        size: Number of ranks.
        name: Prefix of the keys, unique in the store.
        timeout: How long to wait for the others.
        must: What all ranks must do, for the message of who waits in vain in `gather`.
        ended: Says which ranks have ended, which are waited for in vain; None: nobody knows.
        names: What the ranks are called in messages, where that is not by their numbers here.

    Attributes:
        rank: This one.
        size: How many there are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        must: str = "take part",
        ended: FindExited | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._store = store if isinstance(store, PollingStore) else PollingStore(store, timeout, ranks=size)
        self.rank = rank
        self.size = size
        self._name = name
        self._timeout = timeout
        self._must = must
        self._ended = ended
        self._names = range(size) if names is None else names
        self._round = 0

    def decide(self, value: object, rule: Callable[[list[object]], object]) -> object:
        """Gathers every rank's value on rank 0, applies the rule there, and returns its result on all ranks.

        Args:
            value: Anything that JSON can hold.
            rule: From the values, in rank order, to the decision; only called on rank 0.

        Raises:
            ValueError: A rank did not take part within the time-out, or they meant different things: refused on all.
            StoreUnreachableError: The store does not answer.
        """
        self._round += 1
        place = f"consensus/{self._name}/{self._round}"
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            return self._preside(place, rule)
        try:
            self._store.wait([f"{place}/verdict"], self._timeout, self._looking(place, [0]))
        except StoreUnreachableError:
            raise
        except PeerError as error:
            self._store.compare_set(f"{place}/verdict", "", json.dumps([REFUSED, str(error)]))
        except RuntimeError:
            self._give_up(place)
        return self._obey(place)

    def same(self, value: object) -> None:
        """Checks that every rank asks for the same thing.

        Raises:
            ValueError: Some do not, or do not ask at all; raised on every rank that asked.
        """

        def alike(values: list[object]) -> object:
            if any(other != values[0] for other in values):
                raise ValueError(f"the ranks ask for different things: {_shortly(self._names, values)}")
            return True

        self.decide(value, alike)

    def gather(self, value: T) -> list[T]:
        """What each rank has said, in the order of ranks.

        Args:
            value: Anything that JSON can hold.

        Raises:
            RuntimeError: A rank has not spoken within the time-out.
        """
        if self.size == 1:
            return [value]
        try:
            return cast(list[T], self.decide(value, list))
        except ValueError as error:  # `list` takes anything: a rank has not come
            raise RuntimeError(f"{error}: all ranks must {self._must}") from None

    def compare(self, facts: Mapping[str, str], remedy: str, like: Sequence[int] | None = None) -> None:
        """Has all ranks find out whether they say the same; each sends its facts only where somebody's differ.

        Args:
            facts: Name -> value, in an order that is the same on all ranks if they agree.
            remedy: What to do where they do not.
            like: For each rank the one that it must say the same as, alike on all ranks; None: rank 0 for all.

        Raises:
            ValueError: On all ranks, with the same words: a fact differs.
            RuntimeError: A rank has not come within the time-out.
        """
        text = json.dumps(list(facts.items()))
        said = self.gather(hashlib.sha256(text.encode()).hexdigest())
        like = like or [0] * self.size
        other = next((rank for rank, each in enumerate(said) if each != said[like[rank]]), None)
        if other is None:
            return
        pair = like[other], other
        heard = self.gather(text if self.rank in pair else "")
        first, second = (dict(_FACTS.read(heard[rank])) for rank in pair)
        one, another = (self._names[rank] for rank in pair)
        for name in [*first, *second]:
            here, there = first.get(name, "not there"), second.get(name, "not there")
            if here != there:
                raise ValueError(
                    f"`{name}` is {there} on rank {another} and {here} on rank {one}; wanted the same on all ranks: "
                    f"{remedy}"
                )
        raise ValueError(
            f"the parameters of rank {another} are in another order than those of rank {one}; wanted the same on all "
            "ranks"
        )

    def _preside(self, place: str, rule: Callable[[list[object]], object]) -> object:
        try:
            values = self._values(place)
            verdict = [REFUSED, self._missing(place)] if values is None else ["accepted", rule(values)]
        except ValueError as error:
            verdict = [REFUSED, str(error)]
        except PeerError as error:
            verdict = [REFUSED, str(error)]
        self._store.compare_set(f"{place}/verdict", "", json.dumps(verdict))
        return self._obey(place)

    def _values(self, place: str) -> list[object] | None:
        """What every rank proposes, in rank order; None where one does not in time."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        values: list[object] = []
        for keys in self._blocks(place):
            try:
                seconds = max(0.0, deadline - time.monotonic())
                self._store.wait(keys, timedelta(seconds=seconds), self._looking(place, range(self.size)))
            except (StoreUnreachableError, PeerError):
                raise
            except RuntimeError:
                return None
            values += map(_VALUE.read, self._store.multi_get(keys))
        return values

    def _looking(self, place: str, ranks: Sequence[int]) -> Callable[[], None]:
        """What looks, while this rank waits for the word of some, whether those that are silent have ended."""
        backoff = Backoff()

        def look() -> None:
            if self._ended is None or not backoff.is_due():
                return
            if self.rank == 0:
                silent = (rank for rank in ranks if rank and not self._store.check([f"{place}/{rank}"]))
                ranks_to_ask = list(islice(silent, MOST_PROBES))
            else:  # whose verdict is waited for: it may have spoken
                ranks_to_ask = list(ranks)
            if ended := self._ended(ranks_to_ask):
                names = ", ".join(str(self._names[rank]) for rank in ended)
                raise PeerError(f"rank {names} has ended: look at its output", tuple(ended))

        return look

    def _blocks(self, place: str) -> list[list[str]]:
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        return [keys[start : start + BLOCK] for start in range(0, self.size, BLOCK)]

    def _give_up(self, place: str) -> None:
        """Whoever gives up first looks who is missing, and decides for all: rank 0's verdict is set the same way."""
        if int(self._store.compare_set(f"{place}/judge", "", str(self.rank))) != self.rank:
            try:
                self._store.wait([f"{place}/verdict"], GRACE + timedelta(seconds=Naps(self.size).longest))
                return
            except StoreUnreachableError:
                raise
            except RuntimeError:  # that one is lost itself
                log.debug("nobody has decided %s", place)
        self._store.compare_set(f"{place}/verdict", "", json.dumps([REFUSED, self._missing(place)]))

    def _obey(self, place: str) -> object:
        kind, result = _DECIDED.read(self._store.read(f"{place}/verdict"))
        if kind == REFUSED:
            raise ValueError(f"`{self._name}` was refused on all ranks: {result}")
        return result  # what the rule returned, as JSON gives it back

    def _missing(self, place: str) -> str:
        blocks = [keys for keys in self._blocks(place) if not self._store.check(keys)]
        silent = [int(key.rsplit("/", 1)[1]) for keys in blocks for key in keys if not self._store.check([key])]
        names = ", ".join(str(self._names[rank]) for rank in silent)
        return (
            f"rank {names or '?'} did not ask for it within {self._timeout.total_seconds():g} s; wanted "
            "the same call on all ranks"
        )


def _shortly(names: Sequence[int], values: Sequence[object]) -> str:
    return "; ".join(f"rank {name}: {str(value)[:60]}" for name, value in zip(names, values[:4], strict=False))
