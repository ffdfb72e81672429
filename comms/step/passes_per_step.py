"""Refuses optimizers that run several averaged backward passes per step, if the compressor keeps their momentum.

The compressor folds a gradient into the momentum, and decays it, once per averaged pass. SAM, LBFGS and every closure
that an optimizer calls more than once average several gradients per step, of which the step uses one: the momentum
decays several times per step, and holds gradients that no step has used. `zero_grad()` between the passes does not
help.

Such passes cannot be made right. Each returns its result before the next one begins, and nothing tells the hook which
of them the step will use: that one has to return the momentum, and the others, by which SAM and LBFGS move the weights,
the plain gradient, without a trace in the momentum or in the residuals. With the momentum in the optimizer all of them
return the plain gradient. So training is refused, as soon as it is sure to be of this kind:

- The weights have changed since the last pass, and no optimizer step has ended since. Their versions show it, and for
  changes of `.data`, which autograd does not count, the values of a few of them. If an optimizer is in its step (LBFGS,
  a closure of SAM), the pass is refused; otherwise the next step, before it changes a weight.
- `MOST_STEPS` steps in a row of one optimizer came after several passes each. An occasional pass without a step is
  normal: a GradScaler skips steps, and a script may skip a batch. Optimizers that step in turn, each after passes of
  the other one, are refused by this rule, too.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.compressors.base import Layout

if TYPE_CHECKING:
    from gradwire.comms.compression import Compression

MOST_SAMPLES, SAMPLE_NUMEL = 4, 256
"""Parameters whose values are compared, of those in the first bucket of a pass, and first elements of each."""
MOST_STEPS = 3
"""Optimizer steps in a row after several passes each at which training is refused. A GradScaler that lowers its scale
skips several steps, but then trains for thousands of steps before it skips the next one."""

SEVERAL_PASSES = "each of the last {steps} steps of an optimizer came after several averaged backward passes"
MOVED = "the weights have changed between two averaged backward passes without a step of the optimizer"
REFUSED = (
    "{found}, as with SAM, LBFGS or a closure that is called repeatedly. Compressor {compressor!r} keeps the "
    "optimizer's momentum, which it would decay once per pass, not once per step. Average micro-batches once, with the "
    "last of a step (model.no_sync(); FSDP2: model.set_requires_gradient_sync(False)), or let the optimizer keep its "
    'momentum: leave out take_momentum(optimizer), and pass\n    compressor_options={{"momentum": 0.0}}'
)

_listeners: "weakref.WeakSet[PassesPerStep]" = weakref.WeakSet()
"""Listeners of all models; the hook on optimizers is registered once for the process."""


class PassesPerStep(StepListener):
    """Counts the averaged backward passes of one model between two steps of its optimizer.

    Thread safety: the thread that runs backward calls the listener's methods, and the training thread, which waits
    for that one, steps the optimizer.

    Args:
        compression: The compressor, which keeps a momentum.
        parameters: The model's parameters; empty if they are not known yet.
    """

    wants_buckets = True

    def __init__(self, compression: "Compression", parameters: Iterable[Tensor] = ()) -> None:
        self._compression = compression
        self._parameters = set(map(id, parameters))
        self._layouts: set[int] = set()
        self._passes = 0
        """Averaged passes since the last step of any optimizer."""
        self._all_passes = 0
        self._taken: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Optimizer -> (`_all_passes` at its last step, its steps in a row until then after several passes each)."""
        self._steps: weakref.ref[Optimizer] | None = None
        """The optimizer that is in its step, the outer one if it steps another; None between two steps."""
        self._sample: list[tuple[Tensor, int, Tensor | None]] = []
        """Parameters of the first bucket of the last pass, their versions and some of their values then; empty once a
        step has ended."""
        self._refused: str | None = None
        """Reason for which all later passes are refused."""
        self._moved = False
        self._differs: list[Tensor] = []
        """One 0-dim bool on the weights' device, or none: whether values have changed since the last step."""
        self._has_moved = True
        """Whether the weights had moved in this way before the last step, too; true before the first step."""
        _listeners.add(self)
        _register()

    def step_began(self, steps: int) -> None:
        """Compares the weights with those at the last pass; refuses a further backward pass before an optimizer step.

        On CUDA it may wait for the device if an optimizer is in its step.

        Raises:
            RuntimeError: The running optimizer has moved the weights since the last pass, or `MOST_STEPS` steps in a
                row came after several passes each.
        """
        if self._compression.is_idle:
            return
        if self._refused is not None:
            raise self._refusal(self._refused)
        self._moved |= any(each._version != version for each, version, _ in self._sample)
        # Without memory nothing is compared: the launch that follows reports it to all ranks.
        with suppress(torch.OutOfMemoryError):
            self._differs += [
                (first_values(each) != values).any() for each, _, values in self._sample if values is not None
            ]
            self._differs = [torch.stack(self._differs).any()] if self._differs else []
        self._sample = []
        if self._steps is not None and self._have_moved():
            raise self._refusal(MOVED)

    def bucket_arrived(self, layout: Layout | None, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Records a bucket's parameters, by which the model's optimizer is recognized; see `StepListener`.

        Of the first bucket of a pass it also keeps the versions of all parameters and, if there is a layout, copies of
        some values: ranks of a sharded model, which gives none, hold unlike values, and all have to decide alike.
        """
        if id(layout) not in self._layouts:
            self._layouts.add(id(layout))
            self._parameters.update(map(id, parameters))
        if not self._sample:
            self._sample = [(each, each._version, None) for each in parameters]
            with suppress(torch.OutOfMemoryError):
                for number, (each, version, _) in enumerate(self._sample[: MOST_SAMPLES if layout else 0]):
                    self._sample[number] = each, version, first_values(each).clone()

    def step_ended(self, step: EndedStep) -> None:
        """Counts the finished backward pass, if dense gradients of this rank were averaged in it.

        A pass that `Join` takes for this rank, which has no inputs left, is not counted; nor is any pass if all ranks
        are on one node, where nothing is compressed.

        Args:
            step: The finished step; not read.
        """
        counts = bool(self._sample) and not self._compression.is_idle
        self._passes += counts
        self._all_passes += counts

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Records that an optimizer begins a step, and how many averaged passes came since its last one.

        Ignored if the optimizer has none of this model's parameters. At its `MOST_STEPS`th step in a row after several
        passes each, all later passes are refused (`step_began`).

        Args:
            optimizer: Any optimizer of the process, just before its step.

        Raises:
            RuntimeError: The weights have moved between two passes before this step, and did so before the last step,
                too, if there was one. A single time is accepted: a step may have been skipped, and weights exchanged
                for a test.
        """
        if not self._is_of_model(optimizer):
            return
        if self._steps is None or self._steps() in (None, optimizer):
            self._steps = weakref.ref(optimizer)
        if self._passes:  # else it is a second optimizer of the same training step
            moved = self._have_moved()
            self._moved = False
            if moved and self._has_moved:
                raise self._refusal(MOVED)
            self._has_moved = moved
        before, in_a_row = self._taken.get(optimizer, (self._all_passes - self._passes, 0))
        passes, self._passes = self._all_passes - before, 0
        if passes:
            in_a_row = in_a_row + 1 if passes > 1 else 0
            self._taken[optimizer] = self._all_passes, in_a_row
            if in_a_row == MOST_STEPS:
                self._refused = SEVERAL_PASSES.format(steps=MOST_STEPS)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Records that an optimizer has ended a step, and forgets the weights noted before, which the step has changed.

        Ignored if the optimizer has none of this model's parameters.
        """
        if not self._is_of_model(optimizer):
            return
        self._sample = []
        if self._steps is not None and self._steps() in (None, optimizer):
            self._steps = None

    def _have_moved(self) -> bool:
        """Returns whether weights have changed between averaged passes since the optimizer's last step.

        SAM and LBFGS change them so; training is then refused. `step_began` makes the comparisons; this reads their
        results, for which it waits for the device if values were compared, and forgets them.
        """
        self._moved = self._moved or any(map(bool, self._differs))
        self._differs = []
        return self._moved

    def _is_of_model(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer has a parameter of this model."""
        return any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])

    def _refusal(self, reason: str) -> RuntimeError:
        """Returns the error to raise for the training script, and has `step_began` refuse all later passes.

        Args:
            reason: Clause at the beginning of the message: `MOVED`, or `SEVERAL_PASSES` with its number.
        """
        self._refused = reason
        return RuntimeError(REFUSED.format(found=reason, compressor=self._compression.compressor.name))


def first_values(parameter: Tensor) -> Tensor:
    """Returns a view of the first 256 elements (`SAMPLE_NUMEL`) of a parameter's memory, 1-D; fewer if it has fewer.

    They are compared between two passes: a difference shows that the weights have moved, even by a change of `.data`.

    Args:
        parameter: Parameter of any shape.
    """
    whole = parameter.detach()
    return whole.as_strided((min(whole.numel(), SAMPLE_NUMEL),), (1,))


@cache
def _register() -> tuple[RemovableHandle, RemovableHandle]:
    """Registers the hooks once: torch does not allow a hook to remove itself while it runs."""
    return register_optimizer_step_pre_hook(_optimizer_steps), register_optimizer_step_post_hook(_optimizer_stepped)


def _optimizer_steps(optimizer: Optimizer, args: object, named: object) -> None:
    for listener in list(_listeners):
        listener.optimizer_steps(optimizer)


def _optimizer_stepped(optimizer: Optimizer, args: object, named: object) -> None:
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)
