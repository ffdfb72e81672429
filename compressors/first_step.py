"""Looks at the optimizer when it first steps: by then a training script has shown which one it uses."""

from collections.abc import Mapping
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.compressors.fit import check_optimizer
from gradwire.compressors.registry import Option

_unseen: WeakKeyDictionary[nn.Module, tuple[str, Mapping[str, Option]]] = WeakKeyDictionary()
"""Compressor and options of the models whose optimizer has not stepped yet."""


def check_at_first_step(model: nn.Module, compressor_name: str, options: Mapping[str, Option]) -> None:
    """Runs `check_optimizer` before the first step that an optimizer takes on the model's parameters.

    The step is refused with check_optimizer's ValueError before it changes anything, and so is every further one. An
    optimizer that passes is not looked at again, nor is any after it.

    Args:
        model: Whose gradients the compressor averages; not kept alive.
        compressor_name: As in `compressor=`.
        options: The compressor's options.
    """
    _unseen[model] = compressor_name, options
    _register()


@cache
def _register() -> RemovableHandle:
    """Once for the process: torch runs its hooks in a loop that does not allow one to remove itself."""
    return register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, _args: object, _named: object) -> None:
    for model, (compressor_name, options) in list(_unseen.items()):
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) in own for entry in optimizer.param_groups for parameter in entry["params"]):
            check_optimizer(compressor_name, optimizer, options)
            del _unseen[model]
