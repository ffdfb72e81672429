"""A function that stands in for a CUDA kernel, and is made of many operations of torch, as one operation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fake_cuda.machine import machine
from fake_cuda.tensor import FakeTensor, fresh, view_of


class _Unwrapped:
    """Plain tensors in the place of fake ones, each with a version counter of its own, which shows writes."""

    def __init__(self) -> None:
        self.pairs: list[tuple[FakeTensor, Tensor]] = []

    def replace(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            raw = view_of(value).data
            self.pairs.append((value, raw))
            return raw
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.replace(each) for each in value)
        if hasattr(value, "_replace"):
            return value._replace(**{key: self.replace(each) for key, each in value._asdict().items()})
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
            return dataclasses.replace(value, **{key: self.replace(each) for key, each in held.items()})
        return value


def run_kernel(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any] | None = None
) -> Any:
    """Runs a function of fake tensors as one kernel on the current stream; its temporaries are not looked at.

    Args:
        name: Of the kernel.
        function: Changes tensors in place, by torch's operations (which count versions), or returns new ones.
        arguments: Tensors, also in lists, tuples and dataclasses.
        named: The same, by name.
    """
    unwrapped = _Unwrapped()
    result = function(
        *(unwrapped.replace(each) for each in arguments),
        **{key: unwrapped.replace(each) for key, each in (named or {}).items()},
    )
    if not unwrapped.pairs:
        return result
    reads = [(fake.block, fake) for fake, raw in unwrapped.pairs if not raw._version]
    writes = [(fake.block, fake) for fake, raw in unwrapped.pairs if raw._version]
    running, index = machine(), unwrapped.pairs[0][0].block.device
    if isinstance(result, torch.Tensor):
        result = fresh(result, index)
        writes.append((result.block, result))
    running.access(running.current(index), name, reads, writes)
    return result
