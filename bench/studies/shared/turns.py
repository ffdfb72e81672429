"""Runs configurations in turns on an emulated cluster: the part of its ranks, and the part of the starting process."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench.configuration import Configuration, take_turns
from gradwire.bench.emulation.fork import START_TIMEOUT, ForkedRank, hear_forked
from gradwire.comms.bootstrap.compat import Store, store_of

Make = Callable[[Store], Sequence[Configuration]]
"""Makes the configurations, the same in the same order on all ranks, from the default group's store."""


def tell_turns(
    place: ForkedRank, make: Make, *, rounds: int, warmup: int = 1, timeout: timedelta = START_TIMEOUT
) -> int:
    """Runs one rank's part of a comparison, and returns its exit status 0; rank 0 reports every round.

    Args:
        place: This rank of the forked job.
        make: Function that makes the configurations, see `Make`.
        rounds: Number of timed rounds.
        warmup: Number of rounds before them.
        timeout: Timeout of the default group.
    """
    torch.set_num_threads(1)
    place.connect(timeout)
    place.tell(_taken(place, make, rounds, warmup))
    return 0


def _taken(place: ForkedRank, make: Make, rounds: int, warmup: int) -> list[dict[str, object]]:
    """Runs the rounds and returns their figures; the configurations' models are freed before it returns."""
    group = dist.group.WORLD
    assert group is not None
    configurations = make(store_of(group))
    take_turns(configurations, rounds=rounds, warmup=warmup, interface=place.interface)
    return [{"name": one.name, "seconds": one.seconds, "nic_nbytes": one.nic_nbytes} for one in configurations]


def hear_turns(module: str, arguments: Sequence[str], **cluster: Any) -> dict[str, Configuration]:
    """Runs a module whose `rank_main` calls `tell_turns` on an emulated cluster, and returns its figures by name.

    Args:
        module: Name of the module below gradwire.bench.studies.
        arguments: Arguments that every rank receives.
        cluster: Keyword arguments of `hear_forked`, such as the nodes and the link.

    Raises:
        RuntimeError: This machine cannot emulate a cluster, or a rank failed.
    """
    told = hear_forked(f"gradwire.bench.studies.{module}", arguments, **cluster)
    return {each["name"]: Configuration(**each, step=print) for each in told}
