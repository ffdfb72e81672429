"""What is measured: a way of running collectives. One file for each, `way_*.py`; this one holds the contract."""

from typing import Protocol

from torch import Tensor

from gradwire.compressors.base import Work


class Way(Protocol):
    """The collectives of one library among all ranks. Tensors are contiguous and 1-D, on the way's device.

    A returned Work has been issued; on the CPU its result may be read after `wait()`.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    def facts(self) -> dict[str, str]:
        """What stands above the table, for example the plan in use."""

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Why this way cannot run a collective on an element type with an operation; None if it can."""

    def all_reduce(self, tensor: Tensor, operation: str) -> Work:
        """Reduces in place."""

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Work:
        """Reduces in place; only the root's tensor is defined afterwards."""

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Work:
        """Fills `output` with this rank's part of the reduced `source`."""

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Fills `output` with every rank's `source`."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copies the root's tensor to all."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Sends the r-th part of `source` to rank r."""

    def send_receive(self, output: Tensor, source: Tensor) -> Work:
        """Sends `source` to the next rank and receives `output` from the one before."""

    def barrier(self) -> Work:
        """All ranks meet."""

    def close(self) -> None:
        """Releases memory and connections."""
