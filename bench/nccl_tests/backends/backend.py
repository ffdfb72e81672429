"""Protocol of the backends that are measured; each is in a file `*_backend.py`."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gradwire.compressors.base import Work

Issue = Callable[[], Work]
"""Function that issues a prepared operation, and may be called many times. On the CPU the result may be read after
`wait()`; on CUDA `wait()` only orders streams."""


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
"""Collectives that reduce; the others take elements of any type."""


class Backend(Protocol):
    """The collectives of one library among all ranks. Tensors are contiguous and 1-D, on the backend's device.

    Each collective only prepares the operation, and returns the function that issues it. So the timed part does no
    look-ups in Python, which would be visible beside a collective of one microsecond.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    def facts(self) -> dict[str, str]:
        """Returns facts to print with the table, such as the plan in use: key -> value."""

    def refusal(self, collective: str, element: str, operation: str) -> str | None:
        """Returns why this backend cannot run a collective on an element type with an operation; None if it can.

        Args:
            collective: Name in `COLLECTIVES`.
            element: Name in `ELEMENT_TYPES`.
            operation: Name in `OPERATIONS`, or `none`.
        """

    def all_reduce(self, tensor: Tensor, operation: str) -> Issue:
        """Prepares a reduction of `tensor` over all ranks, in place."""

    def reduce(self, tensor: Tensor, root: int, operation: str) -> Issue:
        """Prepares a reduction of `tensor`, in place; only the root's tensor is defined afterwards."""

    def reduce_scatter(self, output: Tensor, source: Tensor, operation: str) -> Issue:
        """Prepares a reduction of `source` that fills `output` with this rank's part of the result."""

    def all_gather(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an exchange that fills `output` with every rank's `source`, by rank."""

    def broadcast(self, tensor: Tensor, root: int) -> Issue:
        """Prepares a copy of the root's tensor into all other ranks' tensors."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an exchange that sends the r-th part of `source` to rank r, and receives its part into `output`."""

    def send_receive(self, output: Tensor, source: Tensor) -> Issue:
        """Prepares an exchange that sends `source` to the next rank, and receives `output` from the one before."""

    def barrier(self) -> Issue:
        """Prepares a barrier of all ranks."""

    def close(self) -> None:
        """Releases the backend's memory and connections."""


def copy_first(output: Tensor, source: Tensor, issue: Issue) -> Issue:
    """Returns a function that copies `source` into `output` and then issues an operation on `output`; both are timed.

    Args:
        output: Tensor on which the operation works.
        source: Tensor to copy.
        issue: Function that issues the operation.
    """

    def copy_and_issue() -> Work:
        output.copy_(source)
        return issue()

    return copy_and_issue


def copy_after(issue: Issue, output: Tensor, result: Tensor) -> Issue:
    """Returns a function that issues a blocking operation and then copies its result into `output`; both are timed.

    Args:
        issue: Function that issues the operation, and returns when it is done.
        output: Tensor that gets the result.
        result: Tensor in which the operation leaves its result.
    """

    def issue_and_copy() -> Work:
        work = issue()
        output.copy_(result)
        return work

    return issue_and_copy
