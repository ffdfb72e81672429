"""Agreement over the store: every rank publishes a value, rank 0 decides, and all ranks get the same result or error.

`Agreement.decide` is the one mechanism. `gather` returns the values of all ranks, `same` checks that they are equal,
and `compare` names a fact that differs. Use it for decisions that are rare and must fail in the same way on all ranks.

These publish something of each rank in the store and decide nothing by `Agreement`, because it asks all ranks to call:

- Ranks that do not know each other yet: rendezvous.py. A group that is being connected, in a store of its own:
  transport/mpi.py (each rank's place in MPI), transport/segment.py (the name of the shared memory).
- A rank knows only its row and column of a grid: sharded/agreement.py.
- Some ranks may have failed, or are still to come: failure_reporter.py, ring_connections.py, elastic/membership.py,
  elastic/joining.py.
- Nobody waits for an answer: observe/stall.py, observe/order.py, watch/watch_store.py, outer/messages.py (counters of
  ranks that may be steps apart), transport/nccl.py (who has finished with a group).

Numbers of every step are sent with the gradients (observe/number_exchange.py).
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
"""Bytes of one rank's value, at most. The largest are the shapes of a model's parameters."""

_VALUE: MessageType[object] = MessageType(object, most_nbytes=MOST_NBYTES, finite=False)
_DECIDED: MessageType[tuple[str, object]] = MessageType(
    tuple[Literal["accepted", "refused"], object], most_nbytes=MOST_NBYTES, finite=False
)
"""A verdict and its result, which may be any JSON value. Infinity is allowed: rules use it for unknown numbers."""
_FACTS: MessageType[tuple[tuple[str, str], ...]] = MessageType(tuple[tuple[str, str], ...], most_nbytes=MOST_NBYTES)

BLOCK = 512
"""Values that rank 0 reads in one store request."""

GRACE = timedelta(seconds=5)
"""Extra time, after a timeout, for the first rank that timed out to publish which ranks are missing."""


class Agreement:
    """One rank's part in the agreements of a group.

    Invariant: every rank makes one with the same name, and calls the same methods in the same order.

    Args:
        store: Store shared by all ranks.
        rank: This rank.
        size: Number of ranks.
        name: Prefix of the keys, unique in the store.
        timeout: Time to wait for the other ranks.
        must: End of the sentence "all ranks must ..." in the error message of `gather`.
        find_exited: Finds ranks that have exited, so that they are not waited for; None disables that check.
        names: Numbers of the ranks in messages, if they differ from those here.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        must: str = "take part",
        find_exited: FindExited | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._store = store if isinstance(store, PollingStore) else PollingStore(store, timeout, ranks=size)
        self.rank = rank
        self.size = size
        self._name = name
        self._timeout = timeout
        self._must = must
        self._find_exited = find_exited
        self._names = range(size) if names is None else names
        self._round = 0

    def decide(self, value: object, rule: Callable[[list[object]], object]) -> object:
        """Gathers every rank's value on rank 0, applies the rule there, and returns its result on all ranks.

        Blocks until rank 0 has decided. The result has passed through JSON on every rank: a tuple comes back as a list.

        Args:
            value: JSON value of this rank.
            rule: Maps the values, in rank order, to the result, a JSON value; called on rank 0 only. A `ValueError`
                refuses with its text; so does any other exception, by its type, too.

        Raises:
            ValueError: A rank did not take part within the timeout, or has exited, or the rule raised or returned no
                JSON value; raised on all ranks that take part.
            StoreUnreachableError: The store does not answer.
        """
        self._round += 1
        place = f"consensus/{self._name}/{self._round}"
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            return self._decide_for_all(place, rule)
        try:
            self._store.wait([f"{place}/verdict"], self._timeout, self._peer_check(place, [0]))
        except StoreUnreachableError:
            raise
        except PeerError as error:
            self._store.compare_set(f"{place}/verdict", "", json.dumps([REFUSED, str(error)]))
        except RuntimeError:
            self._time_out(place)
        return self._result(place)

    def same(self, value: object) -> None:
        """Checks that the value is the same on all ranks.

        Raises:
            ValueError: It is not, or a rank did not take part; raised on every rank that did.
            StoreUnreachableError: The store does not answer.
        """

        def alike(values: list[object]) -> object:
            if any(other != values[0] for other in values):
                raise ValueError(f"the ranks ask for different things: {_shortly(self._names, values)}")
            return True

        self.decide(value, alike)

    def gather(self, value: T) -> list[T]:
        """Waits until all ranks have called it, and returns their values in rank order; a tuple comes back as a list.

        Args:
            value: JSON value of this rank.

        Raises:
            RuntimeError: A rank did not take part within the timeout, or has exited, or the store does not answer.
        """
        if self.size == 1:
            return [value]
        try:
            return cast(list[T], self.decide(value, list))
        except ValueError as error:
            # The rule `list` refuses nothing, so a rank did not take part.
            raise RuntimeError(f"{error}: all ranks must {self._must}") from None

    def compare(self, facts: Mapping[str, str], remedy: str, like: Sequence[int] | None = None) -> None:
        """Checks that facts are the same on all ranks. Digests are compared first; facts are sent only if they differ.

        Args:
            facts: Name -> value, in an order that is the same on all ranks if they agree.
            remedy: Advice for the error message.
            like: Rank whose value each rank's must equal, by rank; the same on all ranks. None compares all with
                rank 0.

        Raises:
            ValueError: A fact, or the order of the facts, differs; raised on all ranks with the same message.
            RuntimeError: A rank did not take part within the timeout, or has exited, or the store does not answer.
        """
        # Compare digests; most calls end here.
        text = json.dumps(list(facts.items()))
        digests = self.gather(hashlib.sha256(text.encode()).hexdigest())
        like = like or [0] * self.size
        other = next((rank for rank, each in enumerate(digests) if each != digests[like[rank]]), None)
        if other is None:
            return
        # Get the facts of the first rank that differs and of the rank that it must equal, and name the first one.
        pair = like[other], other
        texts = self.gather(text if self.rank in pair else "")
        first, second = (dict(_FACTS.read(texts[rank])) for rank in pair)
        # Every rank raises now: rank 0, whose process may serve the store, stays until the others have read.
        read = [f"consensus/{self._name}/{self._round}/read/{rank}" for rank in range(self.size)]
        self._store.set(read[self.rank], "")
        if self.rank == 0:
            with suppress(RuntimeError):
                self._store.wait(read, GRACE)
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

    def _decide_for_all(self, place: str, rule: Callable[[list[object]], object]) -> object:
        """Collects the values, applies the rule, publishes the verdict and returns its result; rank 0 only.

        Args:
            place: Prefix of the keys of this round in the store.
            rule: Maps the values, in rank order, to the result; an exception refuses.

        Raises:
            ValueError: The verdict is a refusal: of the rule, or because a rank is missing.
            StoreUnreachableError: The store does not answer, so that no verdict can be published.
        """
        try:
            values = self._values(place)
            verdict = json.dumps([REFUSED, self._missing(place)] if values is None else ["accepted", rule(values)])
        except StoreUnreachableError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for a verdict
            known = isinstance(error, ValueError | PeerError)
            verdict = json.dumps([REFUSED, str(error) if known else f"{type(error).__name__}: {error}"])
        self._store.compare_set(f"{place}/verdict", "", verdict)
        return self._result(place)

    def _values(self, place: str) -> list[object] | None:
        """Returns the values of all ranks, in rank order; None if one is missing after the timeout.

        Raises:
            PeerError: A rank that is waited for has exited.
            StoreUnreachableError: The store does not answer.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        values: list[object] = []
        for keys in self._blocks(place):
            try:
                seconds = max(0.0, deadline - time.monotonic())
                self._store.wait(keys, timedelta(seconds=seconds), self._peer_check(place, range(self.size)))
            except (StoreUnreachableError, PeerError):
                raise
            except RuntimeError:
                return None
            values += map(_VALUE.read, self._store.multi_get(keys))
        return values

    def _peer_check(self, place: str, ranks: Sequence[int]) -> Callable[[], None]:
        """Returns a callback for a store wait. It raises `PeerError` once a rank that is waited for has exited."""
        backoff = Backoff()

        def check() -> None:
            if self._find_exited is None or not backoff.is_due():
                return
            if self.rank == 0:
                silent = (rank for rank in ranks if rank and not self._store.check([f"{place}/{rank}"]))
                ranks_to_ask = list(islice(silent, MOST_PROBES))
            else:
                # Rank 0, whose verdict is waited for, even if it has published its value.
                ranks_to_ask = list(ranks)
            if exited := self._find_exited(ranks_to_ask):
                names = ", ".join(str(self._names[rank]) for rank in exited)
                raise PeerError(f"rank {names} has ended: look at its output", tuple(exited))

        return check

    def _blocks(self, place: str) -> list[list[str]]:
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        return [keys[start : start + BLOCK] for start in range(0, self.size, BLOCK)]

    def _time_out(self, place: str) -> None:
        """Publishes, after a timeout, a verdict that names the missing ranks, or waits for the rank that does.

        The first rank to time out decides for all. Rank 0 sets its verdict by the same compare-and-set.
        """
        if self._store.elect(f"{place}/judge", self.rank) != self.rank:
            try:
                self._store.wait([f"{place}/verdict"], GRACE + timedelta(seconds=Naps(self.size).longest))
                return
            except StoreUnreachableError:
                raise
            except RuntimeError:
                # That rank has failed, too.
                log.debug("no verdict of %s was published", place)
        self._store.compare_set(f"{place}/verdict", "", json.dumps([REFUSED, self._missing(place)]))

    def _result(self, place: str) -> object:
        """Reads the verdict, and returns its result; raises `ValueError` if it is a refusal."""
        kind, result = _DECIDED.read(self._store.read(f"{place}/verdict"))
        if kind == REFUSED:
            raise ValueError(f"`{self._name}` was refused on all ranks: {result}")
        # What the rule returned, after JSON: tuples are lists.
        return result

    def _missing(self, place: str) -> str:
        """Returns the error message that names the ranks without a value."""
        blocks = [keys for keys in self._blocks(place) if not self._store.check(keys)]
        silent = [int(key.rsplit("/", 1)[1]) for keys in blocks for key in keys if not self._store.check([key])]
        names = ", ".join(str(self._names[rank]) for rank in silent)
        return (
            f"rank {names or '?'} did not ask for it within {self._timeout.total_seconds():g} s; wanted "
            "the same call on all ranks"
        )


def _shortly(names: Sequence[int], values: Sequence[object]) -> str:
    return "; ".join(f"rank {name}: {str(value)[:60]}" for name, value in zip(names, values[:4], strict=False))
