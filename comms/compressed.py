"""The phase that a compressor runs: this rank's shards, the group it sees, the bytes it sends."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.comms.lanes import Lane
from gradwire.comms.plan.cost import sent_nbytes
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from gradwire.comms.transport.groups import Groups
from gradwire.comms.transport.torch_group import Works, scale_in_place
from gradwire.compressors.base import Compressor, Group, Layout, Work

ALWAYS_GIVES = ("cpu",)
"""Devices that hand out more memory than they have: what runs out there ends the process, and nobody is left to ask."""


def run_compressed(
    compressor: Compressor,
    shards: Sequence[Tensor],
    layouts: Sequence[Layout],
    groups: Sequence[Group],
    flush: bool,
    scale: float = 1.0,
) -> Iterator[Work]:
    """All-reduces shards through a compressor, all in step; yields the works of each round of collectives.

    Args:
        compressor: Who shrinks them.
        shards: 1-D, changed in place; narrow types go through float32.
        layouts: Which parameter lies where in each shard.
        groups: Over which ranks each is summed.
        flush: Add what the compressor holds back and send it all dense.
        scale: Factor on every rank's contribution.
    """
    wide = [_contribution(shard, scale) for shard in shards]
    running = [
        _flushed(compressor, *each) if flush else compressor.all_reduce(*each)
        for each in zip(wide, layouts, groups, strict=True)
    ]
    while pending := [work for work in (next(each, None) for each in running) if work is not None]:
        yield Works(pending)
    for shard, result in zip(shards, wide, strict=True):
        if result.data_ptr() != shard.data_ptr():
            shard.copy_(result)


def _contribution(shard: Tensor, scale: float) -> Tensor:
    """Returns scale * shard in float32: the shard itself, or a copy that leaves it intact until the end.

    A compressor takes memory as it goes. Where that may fail, a gradient that is scaled first is not scaled in place.
    """
    if shard.dtype != torch.float32:
        return shard.float().mul_(scale)
    if scale == 1.0 or shard.device.type in ALWAYS_GIVES:
        scale_in_place(shard, scale)
        return shard
    return shard * scale


def _flushed(compressor: Compressor, shard: Tensor, layout: Layout, group: Group) -> Iterator[Work]:
    compressor.flush(shard, layout)
    yield group.all_reduce(shard)


class Switch:
    """The lane that a compressor's collectives go through now."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane


class LaneGroup:
    """A `Group` that stands for another communicator of the same ranks after each hop, and counts what is sent.

    `sent_nbytes` is what the collectives issued through it send from this rank, headers not counted.
    """

    def __init__(self, groups: Groups, rank: int, members: tuple[int, ...], switch: Switch) -> None:
        self.rank = members.index(rank)
        self._groups = groups
        self._members = members
        self._switch = switch
        self.sent_nbytes = 0.0

    @property
    def _group(self) -> Group:
        return self._groups.get(self._switch.lane, self._members)

    @property
    def size(self) -> int:
        """See `Group.size`."""
        return len(self._members)

    def all_reduce(self, tensor: Tensor) -> Work:
        """See `Group.all_reduce`."""
        self.sent_nbytes += sent_nbytes(ALL_REDUCE, tensor.nbytes, self.size, self.rank)
        return self._group.all_reduce(tensor)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Group.all_to_all`."""
        self.sent_nbytes += source.nbytes * (self.size - 1) / self.size
        return self._group.all_to_all(output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Group.all_gather`."""
        self.sent_nbytes += source.nbytes * (self.size - 1)
        return self._group.all_gather(output, source)

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """See `Group.reduce_scatter`."""
        self.sent_nbytes += sent_nbytes(REDUCE_SCATTER, tensor.nbytes, self.size, self.rank, bounds)
        return self._group.reduce_scatter(tensor, bounds)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """See `Group.all_gather_slices`."""
        self.sent_nbytes += sent_nbytes(ALL_GATHER, tensor.nbytes, self.size, self.rank, bounds)
        return self._group.all_gather_slices(tensor, bounds)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """See `Group.broadcast`."""
        self.sent_nbytes += tensor.nbytes * (self.rank == root)
        return self._group.broadcast(tensor, root)
