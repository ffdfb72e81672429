"""The compressor "none": an exact all-reduce, and optionally a momentum, for parameters beside a lossy compressor."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_REDUCE,
    Collective,
    Layout,
    Member,
    check_gradient,
    equal_bounds,
    refuse_capture,
)
from gradwire.compressors.stateful import Stateful

CACHE_LINE_NUMEL = 16
"""Elements of float32 in 64 bytes: shards cut there share no cache line."""


class Dense(Stateful):
    """An exact sum in float32.

    Args:
        momentum: Factor of a momentum that is applied before the sum, u = momentum * u + gradient: for biases beside a
            compressor that takes over the optimizer's momentum. 0 applies none.
        nesterov: Whether to send gradient + momentum * u instead of u.

    Raises:
        ValueError: `momentum` is out of range.
    """

    def __init__(self, *, momentum: float = 0.0, nesterov: bool = False) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"`momentum` is {momentum}; wanted 0 <= momentum < 1")
        super().__init__("none", ["momentum"] if momentum else [])
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def by_element(self) -> bool:
        """True: each element of the sum depends on the ranks' values of it alone."""
        return True

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket into `parts` shards, one for each rank: all of one length, and the remainder in the last one.

        That length is `layout.numel // parts`, rounded down to a multiple of 16 elements (a cache line of float32).
        With fewer than `16 * parts` elements it is 0: the last shard has the whole bucket and all others are empty.

        Args:
            layout: Parameters of the bucket; only its number of elements counts.
            parts: Number of shards.

        Returns:
            `parts + 1` ascending offsets from 0 to `layout.numel`.
        """
        return equal_bounds(layout.numel, parts, CACHE_LINE_NUMEL)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends in a ring all-reduce of float32."""
        return round(2 * (group_size - 1) / group_size * 4 * layout.numel)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Collective]:
        """Replaces `shard` by its exact sum over the group, after the momentum if there is one."""
        check_gradient(shard)
        if self.momentum:
            if shard.is_cuda:
                refuse_capture(self.name)
            self._fold_momentum(shard, layout)
        if group.size > 1 and shard.numel():
            yield Collective(ALL_REDUCE, (shard,))

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Does nothing: there is no residual, so `shard` stays as it is."""

    def _fold_momentum(self, shard: Tensor, layout: Layout) -> None:
        old, new = self.fields["momentum"].update(layout, shard.device)
        torch.add(shard, old, alpha=self.momentum, out=new)
        if self.nesterov:
            shard.add_(new, alpha=self.momentum)
        else:
            shard.copy_(new)


class WideSum(Dense):
    """Sums float16 and bfloat16 gradients in float32, for the option `sum_dtype`."""

    is_sum = True

    def __init__(self) -> None:
        super().__init__()
        self.name = "float32"

    @property
    def by_element(self) -> bool:
        """False, because owners with unequal parts need sums in the buckets' own dtype."""
        return False

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """The dtypes that are widened to float32: float16 and bfloat16."""
        return torch.float16, torch.bfloat16
