"""Backend `shm`: gradwire's shared-memory collectives of the ranks of one node, without plans and lanes."""

from datetime import timedelta
from functools import partial

from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import REDUCTIONS, Issue, copy_after
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, MULSUM_FACTOR, NO_ARITHMETIC
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.transport.shm import ShmGroup
from gradwire.compressors.base import even_bounds

_SCALED = ("avg", "mulsum")


class ShmBackend:
    """Backend of a shared-memory group of all ranks."""

    def __init__(self, group: ShmGroup) -> None:
        self.rank = group.rank
        self._group = group

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, timeout: timedelta) -> "ShmBackend":
        """Connects with the other ranks, which must all be on this node. Collective.

        Args:
            store: Store that all ranks reach.
            rank: This rank.
            size: Number of ranks.
            timeout: Time limit for connecting, and of the collectives.
        """
        return cls(ShmGroup.create(store, rank, size, key="bench", timeout=timeout))

    def facts(self) -> dict[str, str]:
        """Returns the library, for the header of the table."""
        return {"library": "gradwire shared memory"}

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why shared memory cannot run this; None if it can."""
        kind = ELEMENT_TYPES[element]
        if collective == "sendrecv":
            return "shared memory has no send and receive"
        if collective not in REDUCTIONS:
            return None
        if kind.torch in NO_ARITHMETIC:
            return f"shared memory does not reduce {element}"
        if operation == "prod":
            return "shared memory has sum, max and min, no prod"
        if operation in _SCALED and not kind.floating:
            return f"{operation} needs a floating type"
        if collective == "reduce_scatter" and operation in ("max", "min"):
            return "shared memory's reduce_scatter only sums"
        return None

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares an all-reduce of `tensor` in shared memory, in place."""
        return partial(self._group.all_reduce, tensor, *self._translate(operation))

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares a reduction of `tensor` to the root in shared memory, in place."""
        return partial(self._group.reduce, tensor, root, *self._translate(operation))

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares a reduce-scatter in place on `source`; out of place, this rank's part is then copied to `output`."""
        bounds = even_bounds(source.numel(), self._group.size)
        reduce_scatter = partial(self._group.reduce_scatter, source, bounds, self._translate(operation)[0])
        part = source[bounds[self.rank] : bounds[self.rank + 1]]
        return reduce_scatter if part.data_ptr() == output.data_ptr() else copy_after(reduce_scatter, output, part)

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-gather of every rank's `source` into `output`."""
        return partial(self._group.all_gather, output, source)

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares a broadcast of `tensor` from the root."""
        return partial(self._group.broadcast, tensor, root)

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an all-to-all of equal parts of `source` into `output`."""
        return partial(self._group.all_to_all, output, source)

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Raises NotImplementedError; never called, because `refusal` excludes it."""
        raise NotImplementedError("shared memory has no send and receive")

    def barrier(self) -> Issue:
        """Prepares a barrier of the group."""
        return self._group.barrier

    def close(self) -> None:
        """Closes the group and its shared memory."""
        self._group.close()

    def _translate(self, operation: str) -> tuple[float, str]:
        """Returns an operation of nccl-tests as the group has it: (factor of the result, `sum`, `max` or `min`)."""
        if operation == "avg":
            return 1.0 / self._group.size, "sum"
        return (MULSUM_FACTOR, "sum") if operation == "mulsum" else (1.0, operation)
