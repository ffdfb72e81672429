"""What is measured: a backend that runs collectives. One file for each, `*_backend.py`; this one holds the contract."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gradwire.compressors.base import Work

Issue = Callable[[], Work]
"""Issues an operation that was prepared; on the CPU its result may be read after `wait()`. Again and again."""


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
"""The collectives that reduce; what the others move may be of any type."""


class Backend(Protocol):
    """The collectives of one library among all ranks. Tensors are contiguous and 1-D, on the backend's device.

    A collective prepares and issues nothing: what can be looked up once is not looked up inside the clock, where even a
    few calls of Python show beside a collective of one microsecond.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    def facts(self) -> dict[str, str]:
        """What stands above the table, for example the plan in use."""

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Why this backend cannot run a collective on an element type with an operation; None if it can."""

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Reduces in place."""

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Reduces in place; only the root's tensor is defined afterwards."""

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Fills `output` with this rank's part of the reduced `source`."""

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Fills `output` with every rank's `source`."""

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Copies the root's tensor to all."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Sends the r-th part of `source` to rank r."""

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Sends `source` to the next rank and receives `output` from the one before."""

    def barrier(self) -> Issue:
        """All ranks meet."""

    def close(self) -> None:
        """Releases memory and connections."""


def copy_first(output: Tensor, source: Tensor, issue: Issue) -> Issue:
    """An operation on `output` that begins with a copy of `source`, which is part of its time."""

    def copy_and_issue() -> Work:
        output.copy_(source)
        return issue()

    return copy_and_issue


def copy_after(issue: Issue, output: Tensor, result: Tensor) -> Issue:
    """An operation that is done when `issue` returns and leaves its `result` elsewhere than in `output`."""

    def issue_and_copy() -> Work:
        work = issue()
        output.copy_(result)
        return work

    return issue_and_copy
