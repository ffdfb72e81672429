"""Stands in for DDP's reducer: buckets to hand to a comm hook, and a backward pass to call it in, without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class HandedBucket:
    """Has the methods of torch's `GradBucket`, the object that DDP hands to a comm hook.

    Args:
        index: Position of the bucket in its step.
        buffer: 1-D tensor: the gradients of `parameters`, end to end.
        parameters: Parameters whose gradients are in the bucket.
        last: True for the last bucket of a step.
    """

    def __init__(self, index: int, buffer: Tensor, parameters: Sequence[Tensor], last: bool) -> None:
        self._index, self._buffer, self._parameters, self._last = index, buffer, list(parameters), last

    def index(self) -> int:
        """Returns the bucket's position in its step."""
        return self._index

    def buffer(self) -> Tensor:
        """Returns the gradients, end to end: the tensor itself, not a copy."""
        return self._buffer

    def parameters(self) -> list[Tensor]:
        """Returns the parameters whose gradients are in the bucket."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Returns the gradients in the shapes of their parameters, as views of the buffer."""
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
    """Calls `body` once during a backward pass of autograd, on this thread; what it raises is raised here."""
    leaf = torch.zeros(1, requires_grad=True)
    _Backward.apply(leaf, body).sum().backward()  # type: ignore[no-untyped-call]
