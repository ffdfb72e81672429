"""This module has `EchoGroup`, with which the work of one rank is timed without a network."""

import torch
from torch import Tensor

from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Member


class EchoGroup:
    """Simulates rank 0 of a group in which all ranks hold the same tensors, to time its work without a network.

    Args:
        size: Number of ranks.

    Attributes:
        rounds: Number of times so far that all ranks would have waited for each other: 2 for an all_reduce, else 1.
        exchanged: True once there was an all_to_all or an all_gather.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size
        self.rounds = 0
        self.exchanged = False

    @property
    def member(self) -> Member:
        """This rank and its group, as compressors take it."""
        return Member(self.rank, self.size)

    def all_reduce(self, tensor: Tensor) -> Done:
        """Multiplies the tensor by the number of ranks, in place: the sum of equal tensors."""
        self.rounds += 2
        tensor.mul_(self.size)
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        """Fills `output` with the first part of `source`, as if every rank had sent that."""
        self.rounds += 1
        self.exchanged = True
        output.copy_(torch.cat([source.chunk(self.size)[0]] * self.size) if source.numel() else source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        """Fills `output` with copies of `source`, one for each rank."""
        self.rounds += 1
        self.exchanged = True
        output.view(self.size, -1).copy_(source.view(1, -1))
        return Done()
