"""Backends `gloo` and `nccl`: the collectives of torch.distributed, as its users call them."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import REDUCTIONS, Issue, copy_first
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, NO_ARITHMETIC
from gradwire.comms.transport.works import Done, Works
from gradwire.compressors.base import Work

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}


class TorchBackend:
    """Backend of torch.distributed's collectives on a process group.

    Args:
        group: Process group of all ranks; `close` destroys it.
        backend: Name of the group's backend: `gloo`, `nccl`, or `gradwire` for gradwire's process group.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._group = group
        self._backend = backend

    def facts(self) -> dict[str, str]:
        """Returns the library and its backend, for the header of the table."""
        return {"library": f"torch.distributed {self._backend}"}

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why the backend of torch.distributed cannot run this; None if it can."""
        if operation == "mulsum":
            return f"torch.distributed has no mulsum on {self._backend}"
        if collective not in REDUCTIONS:
            return None
        kind = ELEMENT_TYPES[element]
        if kind.torch in NO_ARITHMETIC:
            return f"torch.distributed's {self._backend} does not reduce {element}"
        if operation == "avg" and not kind.floating:
            return f"torch.distributed's {self._backend} averages floating types alone"
        return None

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares an all-reduce of `tensor`, in place."""
        return _issue(dist.all_reduce, tensor, _OPERATIONS[operation], self._group)

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares a reduction of `tensor` to the root, in place."""
        return _issue(dist.reduce, tensor, root, _OPERATIONS[operation], self._group)

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares a reduce-scatter of `source` into this rank's `output`."""
        return _issue(
            dist.reduce_scatter_single,
            output,
            source,
            _OPERATIONS[operation],
            self._group,
        )

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-gather of every rank's `source` into `output`; types that gloo refuses go as bytes."""
        return _issue(dist.all_gather_single, _movable(output), _movable(source), self._group)

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares a broadcast of `tensor` from the root; types that gloo refuses go as bytes."""
        return _issue(dist.broadcast, _movable(tensor), root, self._group)

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-to-all of equal parts of `source` into `output`; types that gloo refuses go as bytes."""
        return _issue(dist.all_to_all_single, _movable(output), _movable(source), None, None, self._group)

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares sending `source` to the next rank and receiving `output` from the previous one, in one batch."""
        if self._size == 1:
            return copy_first(output, source, Done)
        after, before = (self.rank + 1) % self._size, (self.rank - 1) % self._size
        calls = [
            dist.P2POp(dist.isend, source, after, self._group),
            dist.P2POp(dist.irecv, output, before, self._group),
        ]
        return lambda: Works(cast(list[Work], dist.batch_isend_irecv(calls)))

    def barrier(self) -> Issue:
        """Prepares a barrier of the process group."""
        return _issue(dist.barrier, self._group)

    def close(self) -> None:
        """Destroys the process group."""
        dist.destroy_process_group(self._group)


def _movable(tensor: Tensor) -> Tensor:
    """Returns a tensor, or a view of it as bytes if gloo would refuse its type ("Invalid scalar type").

    gloo refuses these types even in collectives that do not reduce.
    """
    return tensor.view(torch.uint8) if tensor.dtype in NO_ARITHMETIC else tensor


def _issue(call: Callable[..., object], *arguments: object) -> Issue:
    """Returns a function that issues a collective of torch.distributed asynchronously, and returns its Work.

    torch returns None instead to ranks outside the group, but here all ranks are in it.
    """
    return cast(Issue, partial(call, *arguments, async_op=True))
