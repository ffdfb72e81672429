"""Calls a comm hook as DDP's reducer does, with no model: buckets as they come, during a backward pass of autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class HandedBucket:
    """What DDP hands to a hook.

    Args:
        index: Of the bucket in its step.
        buffer: 1-D: the gradients of `parameters`, end to end.
        parameters: Whose gradients these are.
        last: No other bucket comes in this step.
    """

    def __init__(self, index: int, buffer: Tensor, parameters: Sequence[Tensor], last: bool) -> None:
        self._index, self._buffer, self._parameters, self._last = index, buffer, list(parameters), last

    def index(self) -> int:
        """Its place in the step."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients, end to end."""
        return self._buffer

    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """The gradients in the shapes of their parameters; views of the buffer."""
        flats = torch.split(self._buffer, [each.numel() for each in self._parameters])
        return [flat.view(each.shape) for flat, each in zip(flats, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket comes in this step."""
        return self._last


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, body: Callable[[], None]) -> Tensor:
        ctx.body = body
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.body()
        return gradient, None


def in_backward(body: Callable[[], None]) -> None:
    """Runs `body` in a backward pass of autograd, on this thread."""
    leaf = torch.zeros(1, requires_grad=True)
    _Backward.apply(leaf, body).sum().backward()  # type: ignore[no-untyped-call]
