"""A `Group` on top of one of torch's C++ process groups (gloo, NCCL); all its works are asynchronous."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.compat import TorchGroup, TorchWork, all_gather_single, all_to_all_single
from gradwire.comms.errors import PeerError
from gradwire.compressors.base import Work

Alarm = Callable[[], str | None]
"""Returns why another rank has given up; None while all is well."""

SLICE = timedelta(seconds=1)
"""How long a wait goes on before it asks the alarm."""


class TorchTransport:
    """The collectives of `Group` on a torch process group.

    Args:
        group: Made by `gloo.connect` or `nccl.connect`.
        rank: This rank's index in the group.
        size: Number of ranks.
        alarm: Asked about once a second while a work is waited for; what it returns, another rank has given up for.
            A broken connection shows only to its two ends, and gloo has no way to wake the others.
    """

    def __init__(self, group: TorchGroup, rank: int, size: int, alarm: Alarm | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._alarm = alarm

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """See `Group.all_reduce`. Gloo runs a ring: each element is summed on one rank and copied to the others."""
        scale_in_place(tensor, scale)
        return self._pending(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """See `Group.all_to_all`."""
        parts = [source.numel() // self.size] * self.size
        return self._exchange(output.view(-1), source.view(-1), parts, parts)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """See `Group.all_gather`."""
        return self._pending(all_gather_single(self._group, output.view(-1), source.view(-1)))

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """See `Group.reduce_scatter`. Every rank sends each slice to its owner, which sums in rank order.

        One message for each peer and (size - 1)/size of the tensor sent: the lower bound. Gloo's own reduce_scatter
        needs equal slices and measured slower.
        """
        sizes = [stop - start for start, stop in pairwise(bounds)]
        own = sizes[self.rank]
        received = tensor.new_empty(own * self.size)
        rows = SlicesToSum(received.view(self.size, own))
        scale_in_place(
            tensor, scale
        )  # not before all memory is taken: where there is none, the gradient stays as it is
        work = self._exchange(received, tensor, [own] * self.size, sizes)
        return _Summing(work, rows, tensor[bounds[self.rank] : bounds[self.rank + 1]])

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """See `Group.all_gather_slices`: one all_gather for equal slices, else a broadcast for each that is not empty."""
        numel = bounds[1] - bounds[0]
        if (
            numel
            and all(bounds[rank] == rank * numel for rank in range(self.size))
            and bounds[-1] - bounds[-2] >= numel
        ):
            return self._gather_equal(tensor, numel, bounds[-1])
        works = []
        for root in range(self.size):
            if bounds[root] < bounds[root + 1]:
                works.append(self.broadcast(tensor[bounds[root] : bounds[root + 1]], root))
        return Works(works)

    def _gather_equal(self, tensor: Tensor, numel: int, stop: int) -> Work:
        """One all_gather for slices of `numel` elements, and a broadcast for what the last one has beyond that."""
        even = numel * self.size
        own = tensor[self.rank * numel : (self.rank + 1) * numel].clone()
        works: list[Work] = [self.all_gather(tensor[:even], own)]
        if stop > even:
            works.append(self.broadcast(tensor[even:stop], self.size - 1))
        return Works(works)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """See `Group.broadcast`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._pending(self._group.broadcast([tensor], options))

    def _exchange(self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int]) -> Work:
        """An all_to_all of unequal parts: `source_splits[p]` elements to rank p, `output_splits[p]` from it."""
        if len({*output_splits, *source_splits}) == 1:
            output_splits = source_splits = []  # NCCL has a shorter way for equal parts
        return self._pending(all_to_all_single(self._group, output, source, output_splits, source_splits))

    def _pending(self, work: TorchWork) -> "_Waiting":
        return _Waiting(work, self._alarm)


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them, in order."""
        for work in self._works:
            work.wait()


class _Waiting:
    """A torch Work under gradwire's protocol."""

    def __init__(self, work: TorchWork, alarm: Alarm | None) -> None:
        self._work = work
        self._alarm = alarm

    def wait(self) -> None:
        if self._alarm is None:
            self._work.wait()
            return
        while True:
            try:
                self._work.wait(SLICE)
            except RuntimeError:
                if self._work.is_completed():  # by now; only a second look tells a time-out from a failure
                    self._work.wait()
                    return
                if reason := self._alarm():
                    raise PeerError(reason) from None
            else:
                return


class SlicesToSum:
    """What all ranks send of one slice, and the memory for its sum.

    Args:
        received: (ranks, elements of the slice), not filled yet.
    """

    def __init__(self, received: Tensor) -> None:
        narrow = received.is_floating_point() and received.element_size() < 4
        self._received = received
        self._wide = torch.empty_like(received[0], dtype=torch.float32) if narrow else None

    def sum(self, target: Tensor) -> None:
        """Sums in rank order into `target`, narrow types in float32 and rounded once; `received` is overwritten."""
        first, *others = self._received
        total = first if self._wide is None else self._wide.copy_(first)
        for contribution in others:
            total += contribution
        target.copy_(total)


def scale_in_place(tensor: Tensor, scale: float) -> None:
    """Multiplies `tensor` by `scale`, unless that is 1: integers have no other."""
    if scale != 1.0:
        tensor.mul_(scale)


class _Summing:
    """Waits for the slices of all ranks and sums them."""

    def __init__(self, work: Work, rows: SlicesToSum, target: Tensor) -> None:
        self._work = work
        self._rows = rows
        self._target = target

    def wait(self) -> None:
        self._work.wait()
        self._rows.sum(self._target)
