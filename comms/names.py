"""Gives parameters the names that every state is keyed by, and computes the layouts of buckets."""

import math
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gradwire.comms.bootstrap.compat import GradBucket
from gradwire.compressors.base import Layout, Slice, plain_name

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
"""Modules from which DDP expects sparse gradients, if their `sparse` is true."""


class ParameterNames:
    """Maps the parameters of a model, by identity, to their names.

    Without a model, parameters are numbered in the order in which they are first seen; DDP passes them to the hook in
    the model's order in its first step, so the numbers agree on all ranks and in every run.

    Attributes:
        model: Function that returns the model that was bound; None before `bind`, and once the model is freed.
        sparse_nbytes: Bytes of the largest parameter of the bound model whose gradient is sparse; 0 if there is none.
        layouts: (id of each parameter of a bucket) -> layout, for all buckets seen so far.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: list[Tensor] = []  # kept alive, so that an id cannot be given to another tensor
        self._bound = False
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.sparse_nbytes = 0
        self.layouts: dict[tuple[int, ...], Layout] = {}

    def bind(self, model: nn.Module) -> None:
        """Takes the parameter names of a model, without what DDP and other wrappers put into them (`plain_name`).

        Args:
            model: The DDP model, or the module inside it.

        Raises:
            ValueError: A model was bound before, or parameters were seen that this one does not have.
        """
        if self._bound:
            raise ValueError(
                "`model` is given to a state that has been given one before: make one HookState for each model, and "
                "bind it once"
            )
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named = {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}
        if any(key not in named for key in self._names):
            raise ValueError(
                "`model` does not have the parameters that this state has already reduced: bind the model "
                "that the hook is registered on"
            )
        self._names = named
        self._parameters = list(inner.parameters())
        self.layouts.clear()
        self._bound = True
        sparse = [each for each in inner.modules() if isinstance(each, EMBEDDINGS) and each.sparse]
        self.sparse_nbytes = max((each.weight.nbytes for each in sparse), default=0)
        self.model = weakref.ref(model)

    @property
    def bound(self) -> bool:
        """Whether the names are those of a bound model; if not, parameters are numbered."""
        return self._bound

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns (name, parameter) of all parameters of the bound model, in order; else of those seen in buckets."""
        return [
            (self._names[id(parameter)], parameter) for parameter in self._parameters if id(parameter) in self._names
        ]

    def known(self, parameters: Sequence[Tensor]) -> tuple[str, ...]:
        """Returns the names of the given parameters, in their order; parameters without a name are left out."""
        return tuple(self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names)

    def numels(self) -> dict[str, int]:
        """Returns name -> number of elements of each known parameter; a complex element counts as two."""
        return {name: math.prod(_memory_shape(parameter)) for name, parameter in self.named_parameters()}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all parameters known so far: in the model's order after `bind`, else as they were seen."""
        return tuple(tuple(parameter.shape) for parameter in self._parameters)

    def layout(self, bucket: GradBucket) -> Layout:
        """Returns the layout of a bucket: the name, shape and range of elements of each parameter in its buffer.

        It is made once for each list of parameters. Before `bind` it numbers parameters that were not seen before.

        Args:
            bucket: Bucket from DDP.

        Raises:
            ValueError: The bucket holds a parameter of another model.
        """
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self.layouts:
            self.layouts[key] = self._build(parameters)
        return self.layouts[key]

    def _build(self, parameters: Sequence[Tensor]) -> Layout:
        """Makes the layout of parameters that lie one after the other; see `layout`."""
        slices, start = [], 0
        for parameter in parameters:
            shape = _memory_shape(parameter)
            slices.append(Slice(self._name(parameter), shape, 0, start, math.prod(shape)))
            start += math.prod(shape)
        return Layout(tuple(slices))

    def _name(self, parameter: Tensor) -> str:
        """Returns a parameter's name; before `bind` it numbers one that is new, after it raises ValueError for that."""
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
    """Returns a parameter's shape with its axes in the order of memory, as DDP's buffer holds its gradient.

    That differs for a channels_last weight, for example. A complex parameter gets a last axis of 2.
    """
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    shape = tuple(parameter.shape[axis] for axis in order)
    return (*shape, 2) if parameter.is_complex() else shape
