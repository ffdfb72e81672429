"""Refuses an optimizer's step on averages of a failed backward pass, on CUDA, where the host learns of it late."""

import weakref
from functools import cache
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class ReportsFailures(Protocol):
    """Protocol of hook states whose averages an optimizer uses, and whose steps may fail."""

    def raise_failure(self) -> None:
        """Raises the CollectiveError with which a training step of this hook state has failed on CUDA, if one has.

        Does nothing on a CPU, where the futures of the step raise it.
        """


_guarded: "weakref.WeakSet[ReportsFailures]" = weakref.WeakSet()


def guard(state: ReportsFailures) -> None:
    """Makes every optimizer of the process raise the failure of `state`, if it has one, before it steps.

    It is for CUDA. Only a weak reference to `state` is kept; a second call changes nothing.
    """
    _guarded.add(state)
    _register()


def release(state: ReportsFailures) -> None:
    """Undoes `guard`: optimizers no longer raise the failures of `state` before they step; a no-op without `guard`."""
    _guarded.discard(state)


@cache
def _register() -> RemovableHandle:
    """Registers the hook once for the process: torch does not allow a hook to remove itself while it runs."""
    return register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: object, named: object) -> None:
    """Raises the failure of the first guarded state that has one; torch calls it before each step of any optimizer."""
    for state in list(_guarded):
        state.raise_failure()
