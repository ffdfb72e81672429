"""Refuses gradients that hold an average which the hook has returned before, if a compressor keeps a momentum.

Without `no_sync`, a second backward pass before `zero_grad` hands the hook the first pass's average plus its own
gradient. Of a sum that is right: the mean of an average that all ranks share is that average. A compressor that folds
in the optimizer's momentum returned a momentum, and would add it to that momentum again: training diverges, by a
factor of about six a step for four passes with a momentum of 0.9.

DDP reads `.grad` behind autograd's accumulation, so the hook cannot see what was there before. Two facts tell it:

- `zero_grad()` sets `.grad` to None, so the next pass makes a new tensor. As long as each pass does, nothing else is
  looked at. A tensor that is still the same, and was changed by DDP's copy of the average and by one accumulation alone
  (`Tensor._version`), holds the average.
- Otherwise (`set_to_none=False`, clipping, passes in `no_sync`, gradients that are views of DDP's buckets) the versions
  do not tell. From then on a hook of each parameter's AccumulateGrad node looks at `.grad` before the first
  accumulation into it: zeros were cleared.

Source: torch/csrc/autograd/functions/accumulate_grad.h and torch/csrc/distributed/c10d/reducer.cpp,
`mark_variable_ready_dense` and `finalize_bucket_dense` (torch 2.13 to 2.15).
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradwire.comms.step.listeners import StepListener
from gradwire.compressors.base import Layout, traits_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gradwire.comms.compression import Compression

COPY_AND_ACCUMULATE = 2
"""Changes of a `.grad` that holds an average and the gradient of one more pass: DDP's copy, and autograd's sum."""

HOLDS_AVERAGE = (
    "`.grad` of {names} still holds the average that an earlier backward pass returned, and compressor {compressor!r} "
    "keeps the optimizer's momentum: it would add that average to the momentum once more, which diverges. Put every "
    "backward pass of an optimizer step but the last, and its forward pass, into\n    with model.no_sync():\nor call "
    "optimizer.zero_grad() before each backward pass, or call backward() once on the sum of several losses. Without "
    "`no_sync` such passes are right if the optimizer has the momentum, not the compressor: "
    'compressor_options={{"momentum": 0.0}}'
)


@dataclass(frozen=True, slots=True)
class _Returned:
    """Describes a parameter's `.grad` as it was when its bucket was passed to the hook.

    Attributes:
        parameter: The parameter.
        grad: Weak reference to its `.grad`.
        version: `grad`'s version, before DDP copied the average into it.
        view: `grad` again, if it is a view of DDP's bucket, which lives as long as the bucket anyway.
    """

    parameter: Tensor
    grad: "weakref.ref[Tensor]"
    version: int
    view: Tensor | None

    @classmethod
    def of(cls, parameter: Tensor, grad: Tensor) -> "_Returned":
        return cls(parameter, weakref.ref(grad), grad._version, grad if grad._is_view() else None)

    @property
    def is_kept(self) -> bool:
        """Whether the parameter's `.grad` is still the tensor that was passed to the hook, or DDP's copy of it.

        False if `.grad` is None, or if the script has set another tensor. If the tensor was a view of DDP's bucket,
        another view with equal values counts as the same: DDP rebuilds its buckets once, and copies each `.grad` into
        them. Only then are values compared, for which it waits for the device on CUDA.
        """
        grad = self.parameter.grad
        if grad is None or self.view is None or grad is self.view:
            return grad is not None and grad is self.grad()
        # DDP rebuilds its buckets once, with a copy of each `.grad` in them.
        return grad._is_view() and torch.equal(grad, self.view)


class ReturnedGradients(StepListener):
    """Refuses gradients whose `.grad` still holds an average that the hook has returned in an earlier backward pass.

    It counts only parameters of which the compressor keeps the optimizer's momentum.

    Invariant: a parameter is in `_returned` from the time when its bucket is passed to the hook until `.grad` is first
    accumulated into or passed to the hook again.

    Args:
        compression: The compressor whose momentum counts.
    """

    wants_buckets = True

    def __init__(self, compression: "Compression") -> None:
        self._compression = compression
        self._returned: dict[int, _Returned] = {}
        self._watched: dict[Layout, tuple[bool, ...]] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._found: list[Tensor] = []
        self._flags: list[tuple[Tensor, Tensor]] = []
        """(Parameter, 0-dim bool on a CUDA device: it holds an average), not read yet."""
        self._watches = False
        weakref.finalize(self, _remove, self._handles)

    def bucket_arrived(self, layout: Layout | None, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Refuses gradients that hold an average of an earlier pass, and records those that DDP replaces by averages.

        Only parameters of which the compressor keeps a momentum count. On CUDA it may wait for the device.

        Raises:
            RuntimeError: One of them holds an average.
        """
        if self._compression.is_idle or layout is None:
            return
        if layout not in self._watched:
            self._watched[layout] = self._with_momentum(layout)
        kept = [each for each, counts in zip(parameters, self._watched[layout], strict=True) if counts]
        # Judge what earlier passes left, before this bucket's own gradients are noted.
        found = [each for each in kept if self._holds_average(each)]
        found += self._found
        if self._flags and not found:  # one wait for the device in each pass that clears gradients by zeros
            found = [each for each, flag in self._flags if bool(flag)]
        self._found, self._flags = [], []
        # Note refused gradients, too: a script that catches the error may not clear them.
        for each in kept:
            if each.grad is not None:
                noted = self._returned[id(each)] = _Returned.of(each, each.grad)
                self._watches |= noted.view is not None
            if self._watches and id(each) not in self._handles:
                self._watch(each)
        if found:
            named = {id(each): item.name for each, item in zip(parameters, layout.slices, strict=True)}
            known = [f"`{named[id(each)]}`" for each in found if id(each) in named][:2]
            rest = f" and {len(found) - len(known)} more" if len(found) > len(known) else ""
            raise RuntimeError(
                HOLDS_AVERAGE.format(
                    names=f"{', '.join(known)}{rest}" if known else f"{len(found)} parameters",
                    compressor=self._compression.compressor.name,
                )
            )

    def _with_momentum(self, layout: Layout) -> tuple[bool, ...]:
        """Returns for each parameter of a layout whether the compressor keeps its momentum."""
        folded = {
            item.name
            for compressor, part in traits_of(self._compression.compressor).parts(layout)
            if getattr(compressor, "momentum", 0.0)
            for item in part.slices
        }
        return tuple(item.name in folded for item in layout.slices)

    def _holds_average(self, parameter: Tensor) -> bool:
        """Returns whether a parameter's `.grad` holds the average of an earlier pass when its bucket gets to the hook.

        It also forgets the record of that pass. False also if the tensor's version does not tell; then all parameters
        are watched from now on. Waits for the device on CUDA if it has to look at values.
        """
        before = self._returned.pop(id(parameter), None)
        if before is None or not before.is_kept:
            return False
        assert parameter.grad is not None
        if id(parameter) in self._handles:  # it was not accumulated into since: this pass did not use it
            return bool(parameter.grad.any())
        if parameter.grad._is_view() or parameter.grad._version - before.version > COPY_AND_ACCUMULATE:
            self._watches = True
            return False
        return bool(parameter.grad.any())

    def _watch(self, parameter: Tensor) -> None:
        """Makes autograd call `_before_accumulation` before it accumulates into a parameter's `.grad`."""
        # The node refers to its hooks from C++, which the garbage collector does not follow: no hook may hold `self`.
        node: Any = get_gradient_edge(parameter).node
        own, key = weakref.ref(self), id(parameter)

        def hook(gradients: Sequence[Tensor]) -> None:
            if (returned := own()) is not None and key in returned._returned:
                returned._before_accumulation(returned._returned.pop(key))

        self._handles[key] = node.register_prehook(hook)

    def _before_accumulation(self, before: _Returned) -> None:
        """Notes a parameter whose `.grad` holds an average (is not zero) before the first accumulation into it.

        Called by autograd, in its threads. On CUDA the device decides, and `bucket_arrived` reads the result.

        Args:
            before: The `.grad` as it was passed to the hook.
        """
        parameter, grad = before.parameter, before.parameter.grad
        if grad is None or not before.is_kept:
            return
        if grad.is_cuda:
            self._flags.append((parameter, grad.any()))
        elif bool(grad.any()):
            self._found.append(parameter)


def _remove(handles: "dict[int, RemovableHandle]") -> None:
    for handle in handles.values():
        handle.remove()
