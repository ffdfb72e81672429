"""Looks at the optimizer when it first steps: by then a training script has shown which one it uses."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.compressors.optim.fit import Taker, check_groups
from gradwire.compressors.registry import Option
from gradwire.compressors.rules import Rule, first_match, rules_from

_unseen: WeakKeyDictionary[nn.Module, tuple[Taker, tuple[Rule, ...]]] = WeakKeyDictionary()
"""Main compressor and rules of the models whose optimizer has not stepped yet."""


def check_at_first_step(
    model: nn.Module,
    compressor_name: str,
    options: Mapping[str, Option],
    rules: Sequence[Rule | Mapping[str, object]] = (),
) -> None:
    """Runs `check_optimizer` before the first step that an optimizer takes on the model's parameters.

    Each compressor, the main one and those that rules name, is checked against the groups that hold its parameters. The
    step is refused with check_optimizer's ValueError before it changes anything, and so is every further one. An
    optimizer that passes is not looked at again, nor is any after it.

    Args:
        model: Whose gradients the compressor averages; not kept alive.
        compressor_name: As in `compressor=`.
        options: The compressor's options.
        rules: As in `rules=`.
    """
    _unseen[model] = Taker(compressor_name, options), rules_from(rules)
    _register()


@cache
def _register() -> RemovableHandle:
    """Once for the process: torch runs its hooks in a loop that does not allow one to remove itself."""
    return register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, _args: object, _named: object) -> None:
    for model, (main, rules) in list(_unseen.items()):
        takers = _takers(model, main, rules)
        groups: dict[Taker, list[dict[str, Any]]] = {}
        for entry in optimizer.param_groups:
            for taker in dict.fromkeys(takers[id(each)] for each in entry["params"] if id(each) in takers):
                groups.setdefault(taker, []).append(entry)
        for taker, entries in groups.items():
            check_groups(taker, optimizer, entries)
        if groups:
            del _unseen[model]


def _takers(model: nn.Module, main: Taker, rules: tuple[Rule, ...]) -> dict[int, Taker]:
    """Returns who takes each parameter, by its id; dense ones have the main compressor's momentum and count as its."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    others = {
        id(rule): Taker(rule.compressor, rule.options, rule.pattern) for rule in rules if rule.compressor != "none"
    }
    return {
        id(parameter): others.get(id(first_match(rules, name, parameter.shape)), main)
        for name, parameter in inner.named_parameters()
    }
