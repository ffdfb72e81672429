"""What all ranks of a job tell each other about an exchange of parameters: few words, through the store."""

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.bootstrap.compat import Store


class Council:
    """Where every rank says something and hears what all have said, in rounds that all ranks take part in.

    Args:
        store: That all ranks share; with keys of its own for each council.
        rank: This one.
        size: Of the job.
        timeout: For the last rank to speak.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._consensus = Consensus(store, rank, size, "Outer", timeout)

    def ask(self, word: str) -> list[str]:
        """What each rank has said in this round, in the order of ranks.

        Raises:
            RuntimeError: A rank has not spoken within the time-out.
        """
        if self.size == 1:
            return [word]
        try:
            return cast(list[str], self._consensus.decide(word, list))
        except ValueError as error:  # `list` takes any words: a rank has not come
            raise RuntimeError(f"{error}: all ranks must make Outer, load its state and synchronize it") from None

    def compare(self, facts: Mapping[str, str]) -> None:
        """Has all ranks find out whether they say the same.

        Args:
            facts: Name -> value, in an order that is the same on all ranks if they agree.

        Raises:
            ValueError: On all ranks, with the same words: a fact differs.
            RuntimeError: A rank has not come within the time-out.
        """
        text = json.dumps(list(facts.items()))
        said = self.ask(hashlib.sha256(text.encode()).hexdigest())
        if len(set(said)) == 1:
            return
        other = next(rank for rank, each in enumerate(said) if each != said[0])
        heard = self.ask(text if self.rank in (0, other) else "")
        first, second = (dict(json.loads(heard[rank])) for rank in (0, other))
        for name in [*first, *second]:
            here, there = first.get(name, "not there"), second.get(name, "not there")
            if here != there:
                raise ValueError(
                    f"`{name}` is {there} on rank {other} and {here} on rank 0; wanted the same on all ranks: make "
                    "the same model and optimizer everywhere, and give Outer the same arguments"
                )
        raise ValueError(
            f"the parameters of rank {other} are in another order than those of rank 0; wanted the same on all ranks"
        )
