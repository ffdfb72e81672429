"""Overlap of FSDP2's collectives with the computation on CPUs.

FSDP2 issues one collective after another and waits for each. On CUDA a stream makes that harmless. On a CPU, gradwire's
own collectives run in the lanes of a communicator: an all-gather returns a work that torch waits for when it needs the
weights, so weights that are prefetched (in the backward pass, or by the user) cost no time. A reduce-scatter returns at
once if torch only makes views of its result before the backward pass ends, and is waited for at that end.

Collectives over torch's own group are not moved: users may issue collectives on that group too, and the order would
then differ between ranks.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from gradwire.comms.sharded.collectives import AllGather, Allocating, ReduceScatter
from gradwire.comms.sharded.param_groups import ShardedParamGroup

MOST_REDUCING = 1
"""Maximum number of reduce-scatters in flight when the gradients of the next parameter group arrive. Each keeps whole
gradients in memory. torch's default on CUDA (set_reduce_scatter_max_input_buffers)."""


class Overlap:
    """Keeps and waits for the reduce-scatters in flight of one model on a CPU.

    Thread safety: none; the thread of the backward pass calls it.

    Args:
        param_groups: Parameter groups of the model; those with collectives of gradwire return early from now on.
    """

    def __init__(self, param_groups: Sequence[ShardedParamGroup]) -> None:
        self._reducing: list[dist.Work] = []
        for param_group in param_groups:
            if isinstance(param_group.all_gather, AllGather):
                param_group.set_all_gather(_AllGather(param_group.all_gather))
            if isinstance(param_group.reduce_scatter, ReduceScatter):
                param_group.set_reduce_scatter(_ReduceScatter(self, param_group, param_group.reduce_scatter))

    def add(self, work: dist.Work, *, later: bool) -> None:
        """Takes a reduce-scatter that was started, and waits for all but the last `MOST_REDUCING`.

        Args:
            work: The reduce-scatter.
            later: Whether it may be in flight until `wait_all`; else this waits for it and all before it.
        """
        self._reducing.append(work)
        if not later:
            self.wait_all()
        while len(self._reducing) > MOST_REDUCING:
            self._reducing.pop(0).wait()

    def wait_all(self) -> None:
        """Waits for all reduce-scatters in flight, then raises the error of the first one that failed."""
        reducing, self._reducing = self._reducing, []
        failed: BaseException | None = None
        for work in reducing:
            try:
                work.wait()
            except BaseException as error:  # noqa: BLE001 - raised below, when no thread writes to gradients any more
                failed = failed or error
        if failed is not None:
            raise failed


class _AllGather(Allocating):
    """An all-gather that returns its work at once."""

    def __init__(self, inner: AllGather) -> None:
        self._inner = inner

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> object:
        work = self._inner.start(output_tensor, input_tensor, group)
        return self._inner(output_tensor, input_tensor, group, async_op) if work is None else work


class _ReduceScatter(Allocating):
    """A reduce-scatter that returns at once if torch does not read its result before the backward pass ends."""

    def __init__(self, overlap: Overlap, param_group: ShardedParamGroup, inner: ReduceScatter) -> None:
        self._overlap = overlap
        self._param_group = param_group
        self._inner = inner

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        work = self._inner.start(output_tensor, input_tensor, group, op)
        if work is None:
            self._inner(output_tensor, input_tensor, group, op, async_op)
            return
        param_group = self._param_group
        keeps = param_group.keeps(param_group.present, output_tensor.dtype)
        self._overlap.add(work, later=not param_group.hooked and keeps)
