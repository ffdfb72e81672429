"""Refuses optimizers that run several averaged backward passes per step, if the compressor keeps their momentum.

The compressor folds a gradient into the momentum, and decays it, once per averaged pass. SAM, LBFGS and every closure
that an optimizer calls more than once average several gradients per step, of which the step uses one: the momentum
decays several times per step, and holds gradients that no step has used. `zero_grad()` between the passes does not
help.

A single pass without a step is normal: a GradScaler skips steps, and a script may skip a batch. So training is refused
only after `MOST_STEPS` steps in a row.
"""

import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.compressors.base import Layout

if TYPE_CHECKING:
    from gradwire.comms.compression import Compression

MOST_STEPS = 3
"""Optimizer steps in a row after several passes each at which training is refused. A GradScaler that lowers its scale
skips several steps, but then trains for thousands of steps before it skips the next one."""

SEVERAL_PASSES = (
    "each of the last {steps} optimizer steps came after several averaged backward passes ({passes} before the last "
    "one), as with SAM, LBFGS or a closure that is called repeatedly. Compressor {compressor!r} keeps the optimizer's "
    "momentum, which it would decay once per pass, not once per step. Let the optimizer keep its momentum: leave out "
    'take_momentum(optimizer), and pass\n    compressor_options={{"momentum": 0.0}}'
)

_listeners: "weakref.WeakSet[PassesPerStep]" = weakref.WeakSet()
"""Listeners of all models; the hook on optimizers is registered once for the process."""


class PassesPerStep(StepListener):
    """Counts the averaged backward passes of one model between two steps of its optimizer.

    Thread safety: the thread that runs backward calls the listener's methods, and the training thread, which waits
    for that one, steps the optimizer.

    Args:
        compression: The compressor, which keeps a momentum.
    """

    wants_buckets = True

    def __init__(self, compression: "Compression") -> None:
        self._compression = compression
        self._parameters: set[int] = set()
        self._layouts: set[int] = set()
        self._passes = 0
        self._last_passes = 0
        self._steps_in_a_row = 0
        _listeners.add(self)
        _register()

    def step_began(self, steps: int) -> None:
        """Refuses a pass after `MOST_STEPS` optimizer steps of several passes each.

        Raises:
            RuntimeError: So many steps in a row came after several passes each.
        """
        if self._steps_in_a_row >= MOST_STEPS:
            raise RuntimeError(
                SEVERAL_PASSES.format(
                    steps=self._steps_in_a_row,
                    passes=self._last_passes,
                    compressor=self._compression.compressor.name,
                )
            )

    def bucket_came(self, layout: Layout | None, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Records a bucket's parameters, by which the model's optimizer is recognized; see `StepListener`."""
        if id(layout) not in self._layouts:
            self._layouts.add(id(layout))
            self._parameters.update(map(id, parameters))

    def step_ended(self, step: EndedStep) -> None:
        """Counts a pass, unless nothing is compressed."""
        self._passes += not self._compression.is_idle

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Records that an optimizer steps: counts how many steps in a row came after several averaged passes.

        Ignored if the optimizer has none of this model's parameters, or if no pass came since the last step: then it is
        a second optimizer of the same training step.

        Args:
            optimizer: Any optimizer of the process, just before its step.
        """
        if self._passes == 0 or not any(
            id(each) in self._parameters for group in optimizer.param_groups for each in group["params"]
        ):
            return
        self._steps_in_a_row = self._steps_in_a_row + 1 if self._passes > 1 else 0
        self._last_passes, self._passes = self._passes, 0


@cache
def _register() -> RemovableHandle:
    """Registers the hook once: torch does not allow a hook to remove itself while it runs."""
    return register_optimizer_step_pre_hook(_optimizer_steps)


def _optimizer_steps(optimizer: Optimizer, args: object, named: object) -> None:
    for listener in list(_listeners):
        listener.optimizer_steps(optimizer)
