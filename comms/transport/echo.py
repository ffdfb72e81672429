"""A group in which every other rank sends the same as this one: what a rank computes can be timed without a network."""

import torch
from torch import Tensor

from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Member


class EchoGroup:
    """Rank 0 of `size` ranks that all hold the same tensors; nothing leaves the process.

    Args:
        size: Number of ranks.

    Attributes:
        rounds: Times so far that every rank would have waited for every other: 2 for a ring's all_reduce, else 1.
        exchanged: Whether there was an all_to_all or an all_gather.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.rounds = 0
        self.exchanged = False

    @property
    def member(self) -> Member:
        """This rank's place, as compressors want it."""
        return Member(self.rank, self.size)

    def all_reduce(self, tensor: Tensor) -> Done:
        """See `Transport.all_reduce`."""
        self.rounds += 2
        tensor.mul_(self.size)
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        """See `Transport.all_to_all`: every rank's first part."""
        self.rounds += 1
        self.exchanged = True
        output.copy_(torch.cat([source.chunk(self.size)[0]] * self.size) if source.numel() else source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        """See `Transport.all_gather`."""
        self.rounds += 1
        self.exchanged = True
        output.view(self.size, -1).copy_(source.view(1, -1))
        return Done()
