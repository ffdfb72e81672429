"""Backend `mpi`: MPI's own collectives through mpi4py, for comparison."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import REDUCTIONS, Issue, copy_after
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES
from gradwire.comms.bootstrap.mpi_launch import load_mpi
from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Work

_DONE = Done()
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_OPERATIONS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
_Buffer = list[object]


class MpiBackend:
    """Backend of MPI's COMM_WORLD; each operation blocks until this rank's part is done."""

    def __init__(self) -> None:
        self._mpi: ModuleType = load_mpi()
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self._size: int = self._world.Get_size()

    def facts(self) -> dict[str, str]:
        """Returns the MPI library's name and version, for the header of the table."""
        return {"library": self._mpi.Get_library_version().splitlines()[0].split(",")[0].strip("\0 \t")}

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why MPI cannot run this; None if it can."""
        if collective not in REDUCTIONS:
            return None
        if ELEMENT_TYPES[element].torch not in _TYPES:
            return f"MPI does not reduce {element}"
        return None if operation in _OPERATIONS else f"MPI has no {operation}"

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares a blocking MPI_Allreduce of `tensor`, in place."""
        return _blocking(self._world.Allreduce, self._mpi.IN_PLACE, self._typed(tensor), self._operation(operation))

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares a blocking MPI_Reduce of `tensor` to the root; in place there."""
        sent, received = (self._mpi.IN_PLACE, self._typed(tensor)) if self.rank == root else (self._typed(tensor), None)
        return _blocking(self._world.Reduce, sent, received, self._operation(operation), root)

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares a blocking MPI_Reduce_scatter_block; in place with a copy, as MPI puts the part at the start."""
        inside = source.data_ptr() <= output.data_ptr() < source.data_ptr() + max(1, source.nbytes)
        target = torch.empty_like(output) if inside else output
        reduce_scatter = _blocking(
            self._world.Reduce_scatter_block, self._typed(source), self._typed(target), self._operation(operation)
        )
        return copy_after(reduce_scatter, output, target) if inside else reduce_scatter

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares a blocking MPI_Allgather of every rank's `source` into `output`, as bytes."""
        inside = output.data_ptr() <= source.data_ptr() < output.data_ptr() + max(1, output.nbytes)
        return _blocking(self._world.Allgather, self._mpi.IN_PLACE if inside else self._raw(source), self._raw(output))

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares a blocking MPI_Bcast of `tensor` from the root, as bytes."""
        return _blocking(self._world.Bcast, self._raw(tensor), root)

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares a blocking MPI_Alltoall of equal parts of `source` into `output`, as bytes."""
        return _blocking(self._world.Alltoall, self._raw(source), self._raw(output))

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares a blocking MPI_Sendrecv: `source` to the next rank, `output` from the previous one."""
        after, before = (self.rank + 1) % self._size, (self.rank - 1) % self._size
        # Positions: buffer, destination, tag, buffer, source.
        return _blocking(self._world.Sendrecv, self._raw(source), after, 0, self._raw(output), before)

    def barrier(self) -> Issue:
        """Prepares a blocking MPI_Barrier."""
        return _blocking(self._world.Barrier)

    def close(self) -> None:
        """Does nothing: MPI ends with the process."""

    def _operation(self, name: str) -> object:
        return getattr(self._mpi, _OPERATIONS[name])

    def _typed(self, tensor: Tensor) -> _Buffer:
        return [_memory(tensor), getattr(self._mpi, _TYPES[tensor.dtype])]

    def _raw(self, tensor: Tensor) -> _Buffer:
        return [_memory(tensor), self._mpi.BYTE]


def _blocking(call: Callable[..., None], *arguments: object) -> Issue:
    """Returns a function that makes a blocking call of MPI, and returns a work that is done."""

    def issue() -> Work:
        call(*arguments)
        return _DONE

    return issue


def _memory(tensor: Tensor) -> object:
    """Returns a tensor's memory as an array of bytes; MPI computes the number of elements from their number."""
    return tensor.view(torch.uint8).numpy()
