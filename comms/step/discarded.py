"""Warns of averaged backward passes whose gradients are thrown away, if the compressor keeps residuals.

What a compressor holds back of one pass, it adds to the next. A script that clears the gradients of a pass without a
step, as a GAN's does with those that the generator's loss leaves in the discriminator, so gets a part of them in a
pass that its optimizer does use, and what had been held back for that one may leave with the gradients thrown away.
Nothing tells the hook during a pass which gradients will be used, so it warns once the script has shown that it does
so regularly. `model.no_sync()` around such passes keeps them off the network, and out of the residuals.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.step.passes_per_step import first_values

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gradwire.comms.compression import Compression
    from gradwire.comms.names import ParameterNames

SAMPLE_NBYTES = 1 << 14
"""Bytes at the beginning of a gradient that are looked at before all of it is."""

MOST_DISCARDED, MOST_PASSES = 3, 256
"""Passes thrown away at which it warns, and passes after which it looks no further. A pass counts if the one before it
was used: the steps in a row that a GradScaler skips count once, and then it trains for thousands of steps."""

DISCARDED = (
    "gradients of averaged backward passes are cleared without a step of the optimizer, {number} times in {passes} "
    "passes, as in a GAN, whose generator's loss leaves gradients in the discriminator. Compressor {compressor!r} adds "
    "what it held back of them to gradients that are used: training goes on otherwise than with plain DDP. Found at "
    "parameter `{name}`. Put such a pass, and its forward pass, into\n    with model.no_sync():\nwhich also saves its "
    "bytes"
)

log = logging.getLogger("gradwire")


class DiscardedPasses(StepListener):
    """Warns once if gradients are regularly cleared between two passes while the weights stay as they are.

    It looks at one parameter in each of the first `MOST_PASSES` passes: a hook of its AccumulateGrad node reads `.grad`
    and the weights before the next gradient is accumulated.

    Args:
        compression: The compressor, whose residuals count.
        names: The model's parameters, with their names.
    """

    def __init__(self, compression: "Compression", names: "ParameterNames") -> None:
        self._compression, self._names = compression, names
        self._noted: tuple[Tensor, int, Tensor] | None = None
        """A parameter at the end of the last pass, its version and some of its values; None once `.grad` was looked
        at."""
        self._was_discarded = self._discarded = False
        """Whether the last pass but one, and the last one, were thrown away."""
        self._found = self._passes = 0
        """Passes thrown away that followed a used one, and all passes."""
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles)

    def step_ended(self, step: EndedStep) -> None:
        """Counts the pass before this one if it was thrown away, and warns.

        Args:
            step: The finished step; not read.
        """
        if self._compression.is_idle or self._passes >= MOST_PASSES:
            return
        self._passes += 1
        self._found += self._discarded and not self._was_discarded
        self._was_discarded, self._discarded = self._discarded, False
        # Note a parameter of this pass, for the next one.
        self._noted = None
        trained = ((name, each) for name, each in self._names.named_parameters() if each.requires_grad and each.numel())
        name, parameter = next(((name, each) for name, each in trained if each.grad is not None), ("", None))
        if parameter is None:
            return
        self._noted = parameter, parameter._version, first_values(parameter).clone()
        self._watch(parameter)
        if self._found >= MOST_DISCARDED and self._compression.keeps:
            kind = self._compression.compressor.name
            log.warning(DISCARDED.format(number=self._found, passes=self._passes, compressor=kind, name=name))
            self._passes = MOST_PASSES
        if self._passes == MOST_PASSES:
            self._noted = None
            _remove(self._handles)

    def _watch(self, parameter: Tensor) -> None:
        """Makes autograd call `_before_accumulation` before it accumulates into a parameter's `.grad`."""
        if id(parameter) in self._handles:
            return
        # The node refers to its hooks from C++, which the garbage collector does not follow: no hook may hold `self`.
        node: Any = get_gradient_edge(parameter).node
        own, key = weakref.ref(self), id(parameter)

        def hook(gradients: Sequence[Tensor]) -> None:
            if (listener := own()) is not None and listener._noted is not None and id(listener._noted[0]) == key:
                listener._before_accumulation(*listener._noted)

        self._handles[key] = node.register_prehook(hook)

    def _before_accumulation(self, parameter: Tensor, version: int, values: Tensor) -> None:
        """Finds out whether the last pass was thrown away; on CUDA it waits for the device if the version is the same.

        Args:
            parameter: Parameter into whose `.grad` autograd is about to accumulate.
            version: Its version at the last pass.
            values: Its first values then, as optimizers that write to `.data` change no version.
        """
        self._noted = None
        cleared = parameter._version == version and (
            parameter.grad is None or _is_zero(parameter.grad, whole=not self._was_discarded)
        )
        self._discarded = cleared and bool((first_values(parameter) == values).all())


def _is_zero(gradient: Tensor, *, whole: bool) -> bool:
    """Returns whether all elements of a gradient are zero.

    Args:
        gradient: The gradient.
        whole: Whether all elements are read if the first are zero. After a pass that was thrown away another one does
            not count, so the first ones do; a benchmark throws all away, and would pay milliseconds in each step.
    """
    if not gradient.is_contiguous():
        return not gradient.any()
    # As bytes: five times as fast on a processor as floats. Zeros that somebody wrote are positive.
    flat = gradient.detach().view(-1).view(torch.uint8)
    return not flat[:SAMPLE_NBYTES].any() and not (whole and flat.any())


def _remove(handles: "dict[int, RemovableHandle]") -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
