"""Checks the optimizer at its first step: only then is it known which optimizer a training script uses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.compressors.base import plain_name
from gradwire.compressors.optim.fit import SPARSE, CompressorUse, check_groups, warn_of_lost_momentum
from gradwire.compressors.registry import Option
from gradwire.compressors.rules import Rule, first_match, rules_from


class HasParameters(Protocol):
    """An object with torch's `named_parameters`, such as a module: names the parameters to optimizer checks and rules.

    Only a weak reference to it is kept, so its class must allow these.
    """

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, parameter); rules match these names."""


Check = tuple[CompressorUse, tuple[Rule, ...]]
"""(main compressor, rules) against which a model's optimizer is checked."""

_checks: WeakKeyDictionary[HasParameters, Check] = WeakKeyDictionary()
"""Main compressor and rules of each model."""

_passed: WeakKeyDictionary[Optimizer, WeakKeyDictionary[HasParameters, tuple[Check, int]]] = WeakKeyDictionary()
"""Optimizer that has stepped -> model for which it was checked -> (check, number of the optimizer's groups then)."""

Begins = Callable[[bool, Sequence[Tensor]], None]
"""Function that is called with whether the optimizer continues from a checkpoint, and the parameters that it trains."""
Averaged = Callable[[], bool]
"""Function that returns whether gradients of the model have been averaged; before that, no step is one of training."""

_begin: WeakKeyDictionary[HasParameters, tuple[Begins, Averaged]] = WeakKeyDictionary()

_seen: WeakSet[Optimizer] = WeakSet()
"""Optimizers that have taken a step."""
_made_their_state: WeakSet[Optimizer] = WeakSet()
"""Optimizers that had no state before their first step, and have loaded none since."""


def check_at_first_step(
    model: HasParameters,
    compressor_name: str,
    options: Mapping[str, Option],
    rules: Sequence[Rule | Mapping[str, object]] = (),
    begins: Begins | None = None,
    averaged: Averaged = lambda: True,
) -> Check:
    """Runs `check_optimizer` before the first step that an optimizer takes on the model's parameters.

    Each compressor, the main one and those that rules name, is checked against the groups that hold its parameters. The
    step is refused with check_optimizer's ValueError before it changes anything, and so is every further one. Each
    optimizer that steps on the model's parameters is checked, once, and again if it has got more groups.

    Args:
        model: Model whose gradients the compressor averages; not kept alive. Its parameters are read at that step.
        compressor_name: Name of the main compressor, as in `compressor=`.
        options: The compressor's options.
        rules: The user's rules, as in `rules=`.
        begins: Called once, before the first step of training on the model's parameters, with whether the optimizer's
            state of them was loaded, and those of them that require a gradient; None calls nothing.
        averaged: Tells a step of training from others: torch.distributed.checkpoint takes one to make the state into
            which it loads.

    Returns:
        The check, to be passed to `withdraw`.
    """
    check = _checks[model] = CompressorUse(compressor_name, options), rules_from(rules)
    if begins is not None:
        _begin[model] = begins, averaged
    watch_optimizers()
    return check


def withdraw(model: HasParameters, check: Check | None) -> None:
    """Ends a check of `check_at_first_step`, unless a later one has replaced it.

    Args:
        model: The model that is checked.
        check: Result of `check_at_first_step` for it; None does nothing.
    """
    if check is not None and _checks.get(model) is check:
        del _checks[model]
        _begin.pop(model, None)


@cache
def watch_optimizers() -> RemovableHandle:
    """Registers a hook before every optimizer's steps, once for the process; also called before any model is known.

    The hook is never removed: torch runs its hooks in a loop that does not allow one to remove itself.
    """
    return register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, _args: object, _named: object) -> None:
    """Runs before each step of any optimizer: checks it for every model whose parameters it changes.

    Raises:
        ValueError: A compressor and the optimizer are known to fail together.
    """
    if optimizer not in _seen:
        _seen.add(optimizer)
        if not any(optimizer.state.values()):
            _made_their_state.add(optimizer)
            optimizer.register_load_state_dict_post_hook(_made_their_state.discard)
    passed = _passed.setdefault(optimizer, WeakKeyDictionary())
    for model, check in list(_checks.items()):
        known = passed.get(model) == (check, len(optimizer.param_groups))
        if known and model not in _begin:
            continue
        main, rules = check
        uses = _uses(model, main, rules)
        groups: dict[CompressorUse, list[dict[str, Any]]] = {}
        for entry in optimizer.param_groups:
            for use in dict.fromkeys(uses[id(each)] for each in entry["params"] if id(each) in uses):
                groups.setdefault(use, []).append(entry)
        if not known:
            for use, entries in groups.items():
                check_groups(use, optimizer, entries)
                warn_of_lost_momentum(main, use, entries)
            passed[model] = check, len(optimizer.param_groups)
        if groups:
            _begin_training(model, optimizer)


def _begin_training(model: HasParameters, optimizer: Optimizer) -> None:
    """Calls the model's `begins` callback, once, if gradients of the model have been averaged.

    Args:
        model: The model.
        optimizer: Optimizer that is about to step on parameters of the model.
    """
    begins, averaged = _begin.get(model, (None, None))
    if begins is None or averaged is None or not averaged():
        return
    del _begin[model]
    trained = [each for _, each in _inside(model).named_parameters() if each.requires_grad]
    known = set(map(id, trained))
    loaded = optimizer not in _made_their_state
    begins(loaded and any(state and id(each) in known for each, state in optimizer.state.items()), trained)


def _uses(model: HasParameters, main: CompressorUse, rules: tuple[Rule, ...]) -> dict[int, CompressorUse]:
    """Returns each parameter's compressor, by the parameter's id.

    Parameters that are sent exactly have the main compressor's momentum and count as compressed by it; those with a
    sparse gradient have none.
    """
    others = {
        id(rule): CompressorUse(rule.compressor, rule.options, rule.pattern)
        for rule in rules
        if rule.compressor != "none"
    }
    return {
        id(each): SPARSE
        if each.grad is not None and each.grad.layout == torch.sparse_coo
        else others.get(id(first_match(rules, plain_name(name), each.shape)), main)
        for name, each in _inside(model).named_parameters()
    }


def _inside(model: HasParameters) -> HasParameters:
    """Returns the module inside a DDP model; any other model itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
