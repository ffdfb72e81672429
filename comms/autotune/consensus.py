"""Decisions that all ranks take alike: every rank proposes, rank 0 decides, every rank follows its decision."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

from gradwire.comms.bootstrap.compat import Store

REFUSED = "refused"


class Consensus:
    """One rank's voice. Every rank makes one with the same name and calls the same methods in the same order.

    Args:
        store: A store that all ranks share.
        rank: This rank.
        size: Number of ranks.
        name: Prefix of the keys, unique in the store.
        timeout: How long to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._name = name
        self._timeout = timeout
        self._round = 0

    def decide(self, value: object, rule: Callable[[list[object]], object]) -> object:
        """Gathers every rank's value on rank 0, applies the rule there, and returns its result on all ranks.

        Args:
            value: Anything that JSON can hold.
            rule: From the values, in rank order, to the decision; only called on rank 0.

        Raises:
            ValueError: A rank did not take part within the time-out, or they meant different things: refused on all.
        """
        self._round += 1
        place = f"consensus/{self._name}/{self._round}"
        self._store.set(f"{place}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            return self._preside(place, rule)
        try:
            self._store.wait([f"{place}/verdict"], self._timeout)
        except RuntimeError:
            # Whoever gives up first decides for all: rank 0 writes its verdict with the same comparison.
            self._store.compare_set(f"{place}/verdict", "", json.dumps([REFUSED, self._missing(place)]))
        return self._obey(place)

    def agree(self, value: object) -> None:
        """Checks that every rank asks for the same thing.

        Raises:
            ValueError: Some do not, or do not ask at all; raised on every rank that asked.
        """

        def same(values: list[object]) -> object:
            if any(other != values[0] for other in values):
                raise ValueError(f"the ranks ask for different things: {_shortly(values)}")
            return True

        self.decide(value, same)

    def _preside(self, place: str, rule: Callable[[list[object]], object]) -> object:
        try:
            self._store.wait([f"{place}/{rank}" for rank in range(self._size)], self._timeout)
            values = [json.loads(self._store.get(f"{place}/{rank}")) for rank in range(self._size)]
            verdict = ["accepted", rule(values)]
        except RuntimeError:
            verdict = [REFUSED, self._missing(place)]
        except ValueError as error:
            verdict = [REFUSED, str(error)]
        self._store.compare_set(f"{place}/verdict", "", json.dumps(verdict))
        return self._obey(place)

    def _obey(self, place: str) -> object:
        kind, result = json.loads(self._store.get(f"{place}/verdict"))
        if kind == REFUSED:
            raise ValueError(f"`{self._name}` was refused on all ranks: {result}")
        return result  # what the rule returned, as JSON gives it back

    def _missing(self, place: str) -> str:
        silent = [str(rank) for rank in range(self._size) if not self._store.check([f"{place}/{rank}"])]
        return (
            f"rank {', '.join(silent) or '?'} did not ask for it within {self._timeout.total_seconds():g} s; wanted "
            "the same call on all ranks"
        )


def _shortly(values: Sequence[object]) -> str:
    return "; ".join(f"rank {rank}: {str(value)[:60]}" for rank, value in enumerate(values[:4]))
