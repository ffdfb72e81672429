"""Which parameter is which: the names that every state is keyed by, and the layout of a bucket."""

import math
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.compressors.base import Layout, Slice


class ParameterNames:
    """Names of a model's parameters, by identity.

    Without a model, parameters are numbered in the order in which they are first seen; DDP hands them over in the
    model's order in its first step, so the numbers agree on all ranks and in every run.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: list[Tensor] = []  # kept alive, so that an id cannot be given to another tensor
        self._bound = False
        self.model: Callable[[], nn.Module | None] = lambda: None
        """Returns the model whose names these are; None before `bind`, and once the model is gone."""
        self.layouts: dict[tuple[int, ...], Layout] = {}
        """The layouts of the buckets seen so far, by the ids of their parameters."""

    def bind(self, model: nn.Module) -> None:
        """Takes the names of `model`, without the `module.` that DDP puts in front.

        Raises:
            ValueError: Other parameters were seen before.
        """
        if self._bound:
            raise ValueError(
                "`model` is given to a state that has been given one before: make one HookState for each model, and "
                "bind it once"
            )
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named = {id(parameter): name for name, parameter in inner.named_parameters()}
        if any(key not in named for key in self._names):
            raise ValueError(
                "`model` does not have the parameters that this state has already reduced: bind the model "
                "that the hook is registered on"
            )
        self._names = named
        self._parameters = list(inner.parameters())
        self.layouts.clear()
        self._bound = True
        self.model = weakref.ref(model)

    @property
    def bound(self) -> bool:
        """Whether the names are a model's own."""
        return self._bound

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters known so far, as `nn.Module.named_parameters` gives them."""
        return [
            (self._names[id(parameter)], parameter) for parameter in self._parameters if id(parameter) in self._names
        ]

    def known(self, parameters: Sequence[Tensor]) -> tuple[str, ...]:
        """The names of those parameters that have one."""
        return tuple(self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names)

    def numels(self) -> dict[str, int]:
        """Elements of each parameter that has a name, of complex ones the real and the imaginary parts."""
        return {name: math.prod(_memory_shape(parameter)) for name, parameter in self.named_parameters()}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all parameters known so far."""
        return tuple(tuple(parameter.shape) for parameter in self._parameters)

    def layout(self, bucket: GradBucket) -> Layout:
        """Returns the layout of a bucket: the place of each parameter in its buffer.

        Raises:
            ValueError: The bucket holds a parameter of another model.
        """
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self.layouts:
            self.layouts[key] = self._build(parameters)
        return self.layouts[key]

    def _build(self, parameters: Sequence[Tensor]) -> Layout:
        slices, start = [], 0
        for parameter in parameters:
            shape = _memory_shape(parameter)
            slices.append(Slice(self._name(parameter), shape, 0, start, math.prod(shape)))
            start += math.prod(shape)
        return Layout(tuple(slices))

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            if self._bound:
                raise ValueError(
                    f"`bucket` holds a parameter of shape {tuple(parameter.shape)} that is not in the model "
                    "this HookState was made for: make one HookState for each model"
                )
            self._names[id(parameter)] = f"parameter{len(self._names)}"
            self._parameters.append(parameter)
        return self._names[id(parameter)]


def _memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape in memory order, as a channels_last weight lies in DDP's buffer; a complex one as pairs."""
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    shape = tuple(parameter.shape[axis] for axis in order)
    return (*shape, 2) if parameter.is_complex() else shape
