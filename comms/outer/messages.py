"""Exchanges counters through the store, by which ranks that have taken different numbers of steps catch up.

`Outer.synchronize()` and `state_dict()` begin with a *barrier*: each rank publishes its counters, and waits until all
ranks have. A rank that is ahead may wait in an exchange instead; its counter says in which one.
"""

from collections.abc import Sequence

from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.boundary.messages import COUNT
from gradwire.comms.communicator import Communicator


class BarrierCounters:
    """Publishes this rank's counters in the store and reads those of the others; a loaded state begins new keys.

    Args:
        communicator: Communicator of the ranks.

    Attributes:
        announced: True once this rank has published, to the present ranks, that it has arrived at a barrier.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._loads = 0
        self.reconnect(communicator)

    def reconnect(self, communicator: Communicator) -> None:
        """Continues among the surviving ranks, in their store, as if this rank had arrived at no barrier yet.

        Args:
            communicator: Communicator of the surviving ranks.
        """
        self.announced = False
        self._rank = communicator.rank
        self._store = PollingStore(communicator.plain_store, communicator.config.timeout, ranks=communicator.size)
        self._barriers = 0
        # Prefix of the keys of the present barrier.
        self._place = ""

    def forget(self) -> None:
        """Starts with new keys, because a state has been loaded on all ranks, and counts barriers from 0 again."""
        self._loads += 1
        self._barriers = 0

    def publish_begun(self, begun: int) -> None:
        """Publishes that this rank waits in an exchange, for ranks that have begun fewer and wait at a barrier.

        Args:
            begun: Number of exchanges that this rank has begun.
        """
        self._store.set(f"outer/{self._loads}/begun/{self._rank}", str(begun))

    def announce(self, steps: int, begun: int) -> None:
        """Publishes that this rank has arrived at the next barrier.

        Args:
            steps: Number of optimizer steps that this rank has taken.
            begun: Number of exchanges that it has begun.
        """
        self._place = f"outer/{self._loads}/barrier{self._barriers}"
        self._barriers += 1
        self.announced = True
        self._store.set(f"{self._place}/steps/{self._rank}", str(steps))
        self._store.set(f"{self._place}/{self._rank}", str(begun))

    def arrived(self, ranks: Sequence[int]) -> dict[int, int]:
        """Returns which ranks have arrived at this rank's present barrier.

        Does not wait. `announce` must have been called.

        Args:
            ranks: Ranks to check.

        Returns:
            Rank -> number of exchanges that it had begun on arrival; ranks that have not arrived have no entry.
        """
        return self._counts(self._place, ranks)

    def waiting(self, ranks: Sequence[int]) -> dict[int, int]:
        """Returns which ranks have published that they wait in an exchange, at any time since the last loaded state.

        Args:
            ranks: Ranks to check.

        Returns:
            Rank -> number of exchanges that it had begun then; ranks that have published nothing have no entry.
        """
        return self._counts(f"outer/{self._loads}/begun", ranks)

    def steps(self, ranks: Sequence[int]) -> dict[int, int]:
        """Returns the step counts of ranks that have arrived at this rank's present barrier.

        Args:
            ranks: Ranks to check.

        Returns:
            Rank -> number of optimizer steps that it has taken; ranks that have not arrived have no entry.
        """
        return self._counts(f"{self._place}/steps", ranks)

    def _counts(self, place: str, ranks: Sequence[int]) -> dict[int, int]:
        """Returns rank -> count for the ranks that have published one below `place`, a prefix of keys."""
        return {
            rank: COUNT.read(self._store.read(f"{place}/{rank}"))
            for rank in ranks
            if self._store.check([f"{place}/{rank}"])
        }
