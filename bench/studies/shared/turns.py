"""Configurations that take turns on an emulated cluster: the part of its ranks, and of who has started them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench.configuration import Configuration, take_turns
from gradwire.bench.emulation.fork import START_TIMEOUT, ForkedRank, hear_forked
from gradwire.comms.bootstrap.compat import Store, store_of

Make = Callable[[Store], Sequence[Configuration]]
"""Makes the configurations, on all ranks alike; given the store of the default group."""


def tell_turns(
    place: ForkedRank, make: Make, *, rounds: int, warmup: int = 1, timeout: timedelta = START_TIMEOUT
) -> int:
    """One rank's part; returns its status. Rank 0 tells every round of all configurations.

    Args:
        place: Where this rank is.
        make: See `Make`.
        rounds: Timed rounds.
        warmup: Rounds before them.
        timeout: Of the default group.
    """
    torch.set_num_threads(1)
    place.connect(timeout)
    place.tell(_taken(place, make, rounds, warmup))
    return 0


def _taken(place: ForkedRank, make: Make, rounds: int, warmup: int) -> list[dict[str, object]]:
    """The configurations' models are gone when it returns."""
    group = dist.group.WORLD
    assert group is not None
    configurations = make(store_of(group))
    take_turns(configurations, rounds=rounds, warmup=warmup, interface=place.interface)
    return [{"name": one.name, "seconds": one.seconds, "nic_nbytes": one.nic_nbytes} for one in configurations]


def hear_turns(module: str, arguments: Sequence[str], **cluster: Any) -> dict[str, Configuration]:
    """Name -> the rounds of a configuration, of a module whose `rank_main` calls `tell_turns`.

    Args:
        module: Below gradwire.bench.studies.
        arguments: Passed to every rank.
        cluster: As for `hear_forked`.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    told = hear_forked(f"gradwire.bench.studies.{module}", arguments, **cluster)
    return {each["name"]: Configuration(**each, step=print) for each in told}
