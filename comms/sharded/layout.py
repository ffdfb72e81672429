"""Layout of flat shards: where the shard of each parameter lies in the flat tensor that FSDP2 makes for one rank.

FSDP2 cuts each parameter along one dimension into as many chunks as there are ranks, pads the chunks to one size and
concatenates those of a parameter group: a rank's *flat shard*. The input of a reduce-scatter and the output of an
all-gather are (ranks, numel) tensors with the flat shard of each rank in a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradwire.comms.sharded.param_groups import ShardedParameter, ShardedParamGroup
from gradwire.compressors.base import Layout, Slice, plain_name
from gradwire.compressors.rules import Rule, first_match

PADDING = "#padding"
"""Suffix of a parameter's name for the padding of its shard. Padding is 1-D, so it is sent uncompressed."""


@dataclass(frozen=True, slots=True)
class NamedShard:
    """This rank's shard of one parameter.

    Attributes:
        name: Name of the parameter in the model.
        shape: Shape of the whole parameter; with tensor parallelism, of this rank's part.
        shard_shape: Shape of this rank's shard, without padding.
        padded_numel: Elements of a shard with its padding, the same on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    padded_numel: int


class ShardNames:
    """The names of a sharded model's parameters, and the layouts of its parameter groups.

    State is kept by the parameter's name, and by the place within this rank's shard of it: to a compressor a shard is a
    parameter of its own (PowerSGD factors the matrix rows that lie here, and rules of size go by the shard).

    Args:
        names: Names of all parameters, by `id` of torch's sharded tensor.
        param_groups: Parameter groups of the model.

    Attributes:
        shards: `id` of a `ShardedParameter` -> its shard on this rank, with its name.

    Raises:
        ValueError: A parameter group has a parameter that is not in the model.
    """

    def __init__(self, names: Mapping[int, str], param_groups: Sequence[ShardedParamGroup]) -> None:
        self.shards: dict[int, NamedShard] = {}
        self._param_groups = tuple(param_groups)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        for param_group in param_groups:
            for one in param_group.parameters:
                if id(one.sharded) not in names:
                    raise ValueError(
                        "`model` lacks a parameter that fully_shard took over: give the module that all of them are in"
                    )
                name = plain_name(names[id(one.sharded)])
                self.shards[id(one)] = NamedShard(name, one.shape, one.shard_shape, one.padded_numel)

    def of(self, parameters: Sequence[ShardedParameter]) -> list[NamedShard]:
        """Returns the shards of some parameters, in their order."""
        return [self.shards[id(one)] for one in parameters]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns names and sharded tensors of all parameters, as an optimizer gets them.

        The shape of a sharded tensor is that of the whole parameter, so decisions by shape are the same on all ranks.
        """
        return [
            (self.shards[id(one)].name, one.sharded)
            for param_group in self._param_groups
            for one in param_group.parameters
        ]

    def numels(self) -> dict[str, int]:
        """Returns name -> number of elements of each shard on this rank, without empty ones.

        The padding of a shard has an entry of its own, with the suffix `PADDING`.
        """
        found: dict[str, int] = {}
        for shard in self.shards.values():
            numel = math.prod(shard.shard_shape)
            found |= {shard.name: numel, shard.name + PADDING: shard.padded_numel - numel}
        return {name: numel for name, numel in found.items() if numel}

    def layout(self, parameters: Sequence[ShardedParameter]) -> Layout:
        """Returns the layout of this rank's flat shard with the gradients of some parameters."""
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = layout_of(self.of(parameters))
        return self._layouts[key]


def layout_of(shards: Sequence[NamedShard]) -> Layout:
    """Returns the layout of concatenated shards, each followed by its padding."""
    slices: list[Slice] = []
    start = 0
    for shard in shards:
        numel = math.prod(shard.shard_shape)
        padding = shard.padded_numel - numel
        if numel:
            slices.append(Slice(shard.name, shard.shard_shape, 0, start, numel))
        if padding:
            slices.append(Slice(shard.name + PADDING, (padding,), 0, start + numel, padding))
        start += shard.padded_numel
    return Layout(tuple(slices))


@dataclass(frozen=True, slots=True)
class ShardRuns:
    """Runs of a flat shard's elements that are compressed, and runs that are sent unchanged; the same on all ranks.

    Attributes:
        numel: Elements of the flat shard.
        compressed: Compressed runs (start, stop), ascending, adjacent ones joined.
        dense: Runs (start, stop) that are sent unchanged, ascending, adjacent ones joined.
        compressed_numel: Elements in all compressed runs.
        dense_numel: Elements in all dense runs.
    """

    numel: int
    compressed: tuple[tuple[int, int], ...]
    dense: tuple[tuple[int, int], ...]
    compressed_numel: int = field(init=False)
    dense_numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressed_numel", sum(stop - start for start, stop in self.compressed))
        object.__setattr__(self, "dense_numel", sum(stop - start for start, stop in self.dense))


def runs_of(shards: Sequence[NamedShard], rules: Sequence[Rule]) -> ShardRuns:
    """Divides a flat shard into compressed and dense runs.

    Args:
        shards: Shards of the flat shard, in their order.
        rules: Rules of compressors. The first one that matches a parameter's name and whole shape decides; its
            compressor "none" keeps the shard dense. A shard without a matching rule is compressed.
    """
    runs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    start = 0
    for shard in shards:
        rule = first_match(rules, shard.name, shard.shape)
        own = runs[rule is None or rule.compressor != "none"]
        stop = start + shard.padded_numel
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        elif stop > start:
            own.append((start, stop))
        start = stop
    return ShardRuns(start, tuple(runs[True]), tuple(runs[False]))
