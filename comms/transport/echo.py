"""A group in which every other rank says the same as this one: what a rank computes can be timed without a network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comms.transport.threads import Done


class EchoGroup:
    """Rank 0 of `size` ranks that all hold the same tensors; nothing leaves the process.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Done:
        """See `Group.all_reduce`."""
        tensor.mul_(self.size)
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Done:
        """See `Group.all_to_all`: everybody's first part."""
        output.copy_(torch.cat([source.chunk(self.size)[0]] * self.size) if source.numel() else source)
        return Done()

    def all_gather(self, output: Tensor, source: Tensor) -> Done:
        """See `Group.all_gather`."""
        output.view(self.size, -1).copy_(source.view(1, -1))
        return Done()

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        """See `Group.reduce_scatter`."""
        tensor[bounds[0]:bounds[1]].mul_(self.size)
        return Done()

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Done:
        """See `Group.all_gather_slices`: the other slices are what this rank holds of them."""
        return Done()

    def broadcast(self, tensor: Tensor, root: int) -> Done:
        """See `Group.broadcast`."""
        return Done()
