"""Names of the parameters whose gradients a collective carries, as far as a model of this process tells.

DDP all-reduces its buckets in the same order in each step, and FSDP2 reduce-scatters its parameter groups. The sizes of
a group's last collectives are therefore matched with that order: if they match at one offset only, each collective gets
the names of its parameters.

Models are searched for, and asked for their buckets, in a thread of their own, because DDP's reducer responds only
between two backward passes.
"""

import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import bucket_parameters, ddp_models
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.sharded.param_groups import root_sharded_modules, sharded_param_groups
from gradwire.comms.watch.collective import IssuedCollective, title_of

_SIZED = re.compile(r"(?P<operation>\w+) of \[(?P<sizes>\d+(?:, \d+)*)\]")

FIRST_SECONDS = 3.0
"""Time from the first collective to the first search for models. It is repeated after twice the time, and so on, for
models that are made, or have their first step, later. A search among a million objects takes 0.1 s."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """Collectives that a model issues in the same order in each step.

    Attributes:
        group: Name of the process group of the collectives.
        operation: Part of the operation's name in torch's flight recorder: `all_reduce`, `reduce_scatter`.
        numels: Number of elements of each collective.
        names: Parameters of each collective: `gradients of 1.bias to 1.weight`.
    """

    group: str
    operation: str
    numels: tuple[int, ...]
    names: tuple[str, ...]


class WatchedModels:
    """Models of this process, as far as a search has found them.

    Thread safety: the search runs in a thread of its own, and replaces the list of cycles as a whole.
    """

    def __init__(self) -> None:
        self._cycles: list[Cycle] = []
        self._next = FIRST_SECONDS
        self._looking: threading.Thread | None = None

    def search(self, seconds: float) -> None:
        """Starts a search for models if it is time and none is under way; returns at once. After an error: never again.

        Args:
            seconds: Time since the first collective.
        """
        if seconds < self._next:
            return
        if self._looking is not None and self._looking.is_alive():
            return
        self._next = 2 * seconds
        self._looking = BackgroundThread(
            "gradwire watch names",
            self._find,
            without="collectives are shown without the names of the parameters that they carry",
            on_failure=self._give_up,
            awaited=False,
        )
        self._looking.start()

    def name(self, group: str, issued: Sequence[IssuedCollective]) -> list[IssuedCollective]:
        """Returns the collectives of a group with `holds` set, as far as their parameters are known.

        Args:
            group: Name of the group.
            issued: Last collectives of the group, ascending.
        """
        named = list(issued)
        for cycle in self._cycles:
            if cycle.group == group:
                named = lay_along(cycle, named)
        return named

    def _give_up(self, error: BaseException) -> None:
        """Ends the searches after a failed one: collectives are shown without names from now on."""
        self._cycles, self._next = [], math.inf

    def _find(self) -> None:
        """Searches for the models of this process; runs in a thread of its own."""
        self._cycles = find_cycles([*ddp_models(), *root_sharded_modules()])


def lay_along(cycle: Cycle, issued: Sequence[IssuedCollective]) -> list[IssuedCollective]:
    """Returns the collectives with the names of their parameters, if their sizes match the cycle at one offset only.

    Otherwise, and for collectives of another operation or of a size that is not in the cycle, they are as given.

    Args:
        cycle: Cycle of a model in the group.
        issued: Last collectives of the group, ascending.
    """
    # Collectives of other sizes are not the model's.
    places = [place for place, each in enumerate(issued) if _numel(each, cycle.operation) in cycle.numels]
    sizes = [_numel(issued[place], cycle.operation) for place in places]
    count = len(cycle.numels)
    # Try each offset of the first collective in the cycle.
    fitting = [
        first
        for first in range(count)
        if all(size == cycle.numels[(first + step) % count] for step, size in enumerate(sizes))
    ]
    named = list(issued)
    if len(fitting) == 1:
        for step, place in enumerate(places):
            named[place] = replace(issued[place], holds=cycle.names[(fitting[0] + step) % count])
    return named


def find_cycles(models: Iterable[nn.Module]) -> list[Cycle]:
    """Returns the collectives that each model issues in a step.

    Args:
        models: DDP models and root modules of FSDP2. DDP models before the end of their first step are left out, and
            those of FSDP2 whose parameter groups are not all of one process group.
    """
    found = []
    for each in models:
        if isinstance(each, DistributedDataParallel):
            buckets = bucket_parameters(each)
            found += [] if not buckets else [_cycle(each.process_group, "all_reduce", buckets)]
        else:
            found += _sharded_cycles(each)
    return found


def _sharded_cycles(root: Any) -> list[Cycle]:
    """Returns the reduce-scatters of a root module of FSDP2 in a step; empty if they are not all of one group."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    param_groups = [
        param_group
        for param_group in sharded_param_groups(root)
        if param_group.shard_group is not None and param_group.parameters
    ]
    if (
        not param_groups
        or len({id(param_group.shard_group) for param_group in param_groups}) > 1
        or param_groups[0].shard_group is None
    ):
        return []
    ranks = param_groups[0].shard_group.size()
    buckets = [
        [(names.get(id(one.sharded), "?"), ranks * one.padded_numel) for one in param_group.parameters]
        for param_group in reversed(param_groups)  # the backward pass comes to the last one first
    ]
    return [_cycle(param_groups[0].shard_group, "reduce_scatter", buckets)]


def _cycle(group: dist.ProcessGroup, operation: str, buckets: Sequence[Sequence[tuple[str, int]]]) -> Cycle:
    """Returns the cycle of a model's buckets.

    Args:
        group: Group of the collectives.
        operation: Part of the operation's name.
        buckets: (name, elements) of the parameters in each bucket, in the order of the collectives.
    """
    title = title_of(group.group_name, group.group_desc, "gloo")
    words = [names[0][0] if len(names) == 1 else f"{names[0][0]} to {names[-1][0]}" for names in buckets]
    return Cycle(
        title,
        operation,
        tuple(sum(numel for _, numel in names) for names in buckets),
        tuple(f"gradients of {each}" for each in words),
    )


def _numel(issued: IssuedCollective, operation: str) -> int:
    """Returns the elements of the first tensor of a collective, read from its text.

    0 if `operation` is not a part of the name of its operation, or if its text has no sizes.
    """
    found = _SIZED.match(issued.what)
    if found is None or operation not in found["operation"]:
        return 0
    return prod(map(int, found["sizes"].split(", ")))
