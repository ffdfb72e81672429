"""This module defines in which order the contributions of ranks to one element are added.

Floating-point addition is not associative, so the order decides the bits of a sum. A `SumOrder` is given to
`TorchTransport.reduce_scatter`, which knows nothing about the reasons for it: `RankOrder` is the default; a plan whose
owners have unequal shares passes a `RingOrder`, so that the sums get the bits that gloo's own all_reduce gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import GLOO_SEGMENT_NBYTES
from gradwire.compressors.base import Work

Rings = tuple[tuple[int, int], ...]
"""Runs of elements (start, stop), each of which one all_reduce of gloo would sum."""

RING_TRIALS = ((torch.float32, 1 << 10), (torch.bfloat16, 1021))
"""Dtypes and lengths of the trial sums of `sums_as_rings`: parts of equal size, and a last part that is shorter."""


class SlicesToSum:
    """The contributions of all ranks to one slice, and the memory for their sum.

    Args:
        received: (ranks, elements of the slice), or one 1-D tensor for each rank; filled before a sum is made, and
            overwritten by it.
    """

    def __init__(self, received: Tensor | Sequence[Tensor]) -> None:
        first = received[0]
        narrow = first.is_floating_point() and first.element_size() < 4
        self._received = received
        self._wide = torch.empty_like(first, dtype=torch.float32) if narrow else None

    def sum_as_rings(self, target: Tensor, runs: Sequence[tuple[int, int]]) -> None:
        """Sums in the order of gloo's rings, and rounds after each addition, as gloo does.

        Args:
            target: 1-D, as long as the slice, in the dtype of `received`; takes the sum.
            runs: Result of `ring_runs` for the whole slice.
        """
        at, size = 0, len(self._received)
        for numel, rank in runs:
            first, *others = (self._received[(rank - back) % size][at : at + numel] for back in range(1, size + 1))
            for contribution in others:
                torch.add(contribution, first, out=first)
            target[at : at + numel] = first
            at += numel

    def sum(self, target: Tensor) -> None:
        """Sums in rank order. Types narrower than 32 bits are summed in float32 and rounded once.

        Args:
            target: 1-D, as long as the slice, in the dtype of `received`; takes the sum, and may be one of its rows.
        """
        first, *others = self._received
        total = first if self._wide is None else self._wide.copy_(first)
        for contribution in others:
            total += contribution
        target.copy_(total)


class SumOrder(Protocol):
    """An order of additions for the sum of one slice of a tensor."""

    def sum(self, slices: SlicesToSum, target: Tensor, start: int, size: int) -> None:
        """Sums the contributions of all ranks into `target`.

        Args:
            slices: Contributions to the slice; overwritten.
            target: 1-D, as long as the slice; takes the sum.
            start: Index of the slice's first element in the tensor.
            size: Number of ranks.
        """


class RankOrder:
    """Adds in rank order, the same for every element."""

    def sum(self, slices: SlicesToSum, target: Tensor, start: int, size: int) -> None:
        """Sums the slices into `target`, in rank order."""
        slices.sum(target)


@dataclass(frozen=True, slots=True)
class RingOrder:
    """Adds in the order of gloo's ring all_reduce, so that the bits are those of an all_reduce.

    Attributes:
        rings: Runs of the tensor, ascending and without gaps, each of which one all_reduce would sum.
    """

    rings: Rings

    def sum(self, slices: SlicesToSum, target: Tensor, start: int, size: int) -> None:
        """Sums the slices into `target`, in the order in which gloo's ring would add them."""
        slices.sum_as_rings(target, ring_runs(self.rings, start, start + target.numel(), size, target.element_size()))


RANK_ORDER = RankOrder()
"""Default order of transports."""


def ring_numel(numel: int, element_nbytes: int, size: int) -> int:
    """Returns how many elements each rank owns in gloo's ring all_reduce; the last owner may have fewer.

    Source: gloo, gloo/allreduce.cc, `ring`: segments of at most a mebibyte, as many for each rank, at least two.

    Args:
        numel: Elements of the tensor.
        element_nbytes: Bytes of one element.
        size: Number of ranks.
    """
    nbytes = numel * element_nbytes
    most = max(1, GLOO_SEGMENT_NBYTES // element_nbytes) * element_nbytes
    segments = -(-max(-(-nbytes // most), 2 * size) // size)  # for each rank
    return segments * -(-nbytes // (segments * size * element_nbytes))


@lru_cache(maxsize=4096)
def ring_runs(rings: Rings, start: int, stop: int, size: int, element_nbytes: int) -> tuple[tuple[int, int], ...]:
    """Returns which rank adds last to each element from `start` to `stop` in gloo's ring.

    In the ring the sum of a part begins at the rank before its owner and is passed down the ranks to the owner.

    Args:
        rings: Runs of elements that one all_reduce each would sum; ascending, and they cover `start` to `stop`.
        start: First element.
        stop: One past the last element.
        size: Number of ranks.
        element_nbytes: Bytes of one element.

    Returns:
        (elements, rank) of each run. The contributions of rank - 1, rank - 2, ... and at last of rank itself are added
        in this order.
    """
    found = []
    for low, high in rings:
        part = ring_numel(high - low, element_nbytes, size)
        for rank in range(size):
            first, last = (min(max(low + place * part, start), high, stop) for place in (rank, rank + 1))
            if first < last:
                found.append((last - first, rank))
    return tuple(found)


class Sums(Protocol):
    """A transport that can sum, as far as a trial needs it."""

    @property
    def rank(self) -> int:
        """Index of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Sums `scale` times a tensor over the ranks, in place."""


def adds_as_ring(rail: Sums, dtype: torch.dtype, numel: int) -> bool:
    """Returns whether a trial all_reduce has the bits that the order of `ring_runs` gives. Every rank calls it.

    Args:
        rail: Transport of the ranks.
        dtype: Dtype of the trial.
        numel: Elements of the trial: so few that gloo's ring sums them, whatever large sums use.
    """
    size = rail.size
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    drawn = [torch.randn(numel, generator=each, dtype=torch.float32, device="cpu") for each in generators]
    rows = torch.stack(drawn).to(dtype)
    total = rows[rail.rank].clone()
    rail.all_reduce(total).wait()
    lengths, lasts = zip(*ring_runs(((0, numel),), 0, numel, size, dtype.itemsize), strict=True)
    last = torch.tensor(lasts, device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))  # of each element
    back = torch.arange(1, size + 1, device="cpu")[:, None]
    first, *others = rows.gather(0, (last - back) % size)
    for contribution in others:
        first = contribution + first
    return torch.equal(total, first)


def sums_as_rings(rail: Sums) -> bool:
    """Returns whether all trial sums have the ring's bits, as this rank sees them. Every rank runs every trial."""
    # Invariant: no short cut after a failed trial, because the other ranks wait in the next one.
    seen = [adds_as_ring(rail, *each) for each in RING_TRIALS]
    return all(seen)
