"""Registers the hook without a line of code: with GRADWIRE_HOOK set, every DistributedDataParallel gets it when made.

DDP takes one hook, once. So the one that is registered here passes each bucket on to the hook that the model's own code
registers later, if it does. An FSDP2 model that torch averages over replicas, after `replicate()` or `fully_shard` over
a mesh of two dimensions, gets the hook at its first backward pass, unless the script has called `gradwire.fsdp.apply`
by then. This module is imported at the end of `import torch`, and only if this variable or one of an option is set;
modules that few models need are imported when one is made.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.comms.bootstrap.compat import (
    REGISTER_BUILTIN,
    GradBucket,
    comm_hook_name,
    ddp_models,
    is_known,
    rename_comm_hook,
    steps_in_backward,
)
from gradwire.comms.config import AUTOMATIC, Config, unused_variables

if TYPE_CHECKING:
    from gradwire.comms.hook import HookState

log = logging.getLogger("gradwire")

FutureTensor = torch.futures.Future[torch.Tensor]


class Automatic:
    """Holds the state of the automatic hook of one model, and the hook that the script has replaced it by.

    Args:
        state: State of gradwire's hook, bound to the model.

    Attributes:
        state: State of gradwire's hook; unbound from the model once `own` is set.
        own: (hook, state) that the script has registered later; None while gradwire's hook is in use.
    """

    def __init__(self, state: "HookState") -> None:
        self.state = state
        self.own: tuple[Callable[..., FutureTensor], object] | None = None


_models: WeakKeyDictionary[DistributedDataParallel, Automatic] = WeakKeyDictionary()
"""DDP models of this process that have the automatic hook."""
replicated = False
"""True once an FSDP2 model that torch averages over replicas has had its first backward pass."""
_logged: set[str] = set()
"""Texts that were logged already."""
_checked = False
"""True once an optimizer has stepped and `_check_for_models` has run."""
_explained = False
"""True once an optimizer has stepped and `_explain_unused_variables` has run."""
_expects_hook = False
"""True once `expect_hook` was called."""
_original = (
    DistributedDataParallel.__init__,
    DistributedDataParallel.register_comm_hook,
    getattr(DistributedDataParallel, REGISTER_BUILTIN),
)
"""Torch's own methods of DDP, which `install` replaces: `__init__`, and the two that register a hook."""


def install() -> None:
    """Gives every DDP model that is made from now on the hook that GRADWIRE_HOOK names, if it can have one.

    It replaces methods of torch's DistributedDataParallel. FSDP2 models that torch averages over replicas get the hook
    at their first backward pass. If a model cannot have it, or no model has it by the first optimizer step, a warning
    says why. A second call does nothing.
    """
    init, register, register_builtin = _original
    if DistributedDataParallel.__init__ is not init:
        return

    @wraps(init)
    def make(model: DistributedDataParallel, *args: Any, **named: Any) -> None:
        init(model, *args, **named)
        _add(model)

    @wraps(register)
    def register_own(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        if automatic_of(model) is None:
            register(model, state, hook)
        else:
            _replace(model, hook, state)

    @wraps(register_builtin)
    def builtin(model: DistributedDataParallel, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # here: torch is not through yet

        if automatic_of(model) is None:
            register_builtin(model, kind)
            return
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        _replace(model, hooks[kind.name], model.process_group)

    from gradwire.comms.sharded.param_groups import at_first_sharded_backward

    register_optimizer_step_pre_hook(_check_for_models)
    at_first_sharded_backward(_add_replicated)
    for name, method in (("__init__", make), ("register_comm_hook", register_own), (REGISTER_BUILTIN, builtin)):
        setattr(DistributedDataParallel, name, method)


def expect_hook() -> None:
    """Makes the first optimizer step warn if variables of options are set but no model has a hook that reads them."""
    global _expects_hook
    if not _expects_hook:
        _expects_hook = True
        register_optimizer_step_pre_hook(_explain_unused_variables)


def automatic_of(model: DistributedDataParallel) -> "HookState | None":
    """Returns the state of a model's automatic hook; None if it has none, or the script's own hook has replaced it."""
    found = _models.get(model)
    return found.state if found is not None and found.own is None else None


def automatic_hook(automatic: Automatic, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Calls gradwire's hook for a bucket, or the script's hook if that has replaced it; DDP calls this function.

    Args:
        automatic: Record of the model's hook.
        bucket: Bucket of gradients.

    Returns:
        Future of the bucket's averaged gradients.
    """
    from gradwire.comms.hook import comm_hook

    if automatic.own is not None:
        hook, state = automatic.own
        return hook(state, bucket)
    return comm_hook(automatic.state, bucket)


def _add(model: DistributedDataParallel) -> None:
    """Registers the automatic hook on a new DDP model, or logs why the model cannot have it.

    Does nothing if GRADWIRE_HOOK is not set. Every rank of the model's group calls it, as the ranks connect here.
    """
    config = Config.automatic()
    if config is None:
        return
    from gradwire.comms.hook import HookState

    found = comm_hook_name(model)
    if found:
        _log_once(f"a DistributedDataParallel has a hook already, {found}: {AUTOMATIC} does not change it")
        return
    if (why := _why_not(model)) is not None:
        _log_once(f"a DistributedDataParallel {why}: {AUTOMATIC} does not apply, and torch reduces its gradients")
        return
    automatic = Automatic(HookState(model, config=config))
    _original[1](model, automatic, automatic_hook)
    _models[model] = automatic
    finalize(model, _report, automatic)
    _log_once(
        f"{AUTOMATIC}={config.compressor}: gradwire averages the gradients of every DistributedDataParallel of this "
        f"process, {_how(config)}; a hook that the script registers replaces it"
    )


def _report(automatic: Automatic) -> None:
    """Logs the report of a model's hook on rank 0; called when the model is freed or the process ends.

    Logs nothing on other ranks, if the script's own hook has replaced this one, or if no step has ended.
    """
    if automatic.own is None and automatic.state.steps and (found := automatic.state.report()).rank == 0:
        log.warning("%s, at the end:\n%s", AUTOMATIC, found)


def _add_replicated(model: nn.Module) -> None:
    """Applies gradwire to a model of FSDP2 at its first backward pass, if torch averages all of it over replicas.

    It does nothing if the script has applied gradwire already, and logs why if the model cannot have it.
    """
    global replicated
    from gradwire.comms.sharded.param_groups import is_replicated, sharded_param_groups

    config = Config.automatic()
    if config is None or not is_replicated(model):
        return
    replicated = True
    if any(param_group.hooked for param_group in sharded_param_groups(model)):
        return
    from gradwire.comms.sharded.apply import apply

    try:
        apply(model, config=config)
    except ValueError as error:  # on all ranks alike
        _log_once(f"{AUTOMATIC} does not apply to an FSDP2 model, and torch reduces its gradients: {error}")
        return
    _log_once(
        f"{AUTOMATIC}={config.compressor}: gradwire averages the gradients of every FSDP2 model that has replicas, "
        f"{_how(config)}; gradwire.fsdp.apply() takes its place if the script calls it before the first step"
    )


def _how(config: Config) -> str:
    """Describes in words for the log how gradients are averaged: exactly, or compressed between nodes."""
    return (
        "exactly" if config.compressor == "none" else f"{config.compressor} between the nodes (one node alone: exactly)"
    )


def _why_not(model: DistributedDataParallel) -> str | None:
    """Returns why a model cannot have the automatic hook, in words that continue its name; None if it can."""
    if not is_known(model.process_group):
        kind = type(model.process_group).__name__
        return f"has a process group of its own, {kind}, that torch.distributed has not made"
    if getattr(model, "skip_all_reduce_unused_params", False):
        return "may skip the last bucket of a step (skip_all_reduce_unused_params), by which a hook detects its end"
    if steps_in_backward(model):
        return "has an optimizer that steps in backward, for which DDP registers a hook of its own"
    from gradwire.comms.transport.groups import why_unusable  # here: torch is not through yet

    unusable = next((why for each in model.parameters() if (why := why_unusable(each.device)) is not None), None)
    return None if unusable is None else f"is {unusable}"


def _check_for_models(optimizer: Optimizer, args: object, named: object) -> None:
    """Warns before the first step of any optimizer, once, if no model has got the hook, as with FSDP.

    Logs nothing in a job of one process, nor if a reason was logged already.

    Args:
        optimizer: Optimizer that is about to step.
        args: Positional arguments of its step; not used.
        named: Keyword arguments of its step; not used.
    """
    global _checked
    if _checked:
        return
    _checked = True
    if _models or replicated or not dist.is_initialized() or dist.get_world_size() == 1 or _logged:
        return
    _log_once(
        f"{AUTOMATIC} is set, and no DistributedDataParallel has been made before the first step of "
        f"{type(optimizer).__name__}: torch reduces the gradients. FSDP2 takes "
        "`gradwire.fsdp.apply(model, ...)` after the last fully_shard; FSDP1 takes nothing of gradwire's"
    )


def _explain_unused_variables(optimizer: Optimizer, args: object, named: object) -> None:
    """Logs once that variables of gradwire's options have no effect, because no DDP model has a hook that reads them.

    It does so before the first optimizer step after torch.distributed is initialised, if there is a DDP model.

    Args:
        optimizer: Optimizer that is about to step; not used.
        args: Positional arguments of its step; not used.
        named: Keyword arguments of its step; not used.
    """
    global _explained
    if _explained or not dist.is_initialized():
        return
    _explained = True
    if (unused := unused_variables()) and ddp_models():
        are, they_have = ("is", "it has") if len(unused) == 1 else ("are", "they have")
        _log_once(
            f"{', '.join(f'`{name}`' for name in unused)} {are} set, but no DistributedDataParallel has a hook of "
            f"gradwire's, so {they_have} no effect; write `gradwire.attach(model)` after the model is wrapped, or put "
            f"{AUTOMATIC}={unused.get('GRADWIRE_COMPRESSOR', 'none')} before the command"
        )


def _replace(model: DistributedDataParallel, hook: Callable[..., FutureTensor], state: object) -> None:
    """Replaces the automatic hook of a model by one that the script has registered, and closes the former's state.

    Args:
        model: Model with the automatic hook.
        hook: Hook of the script, called with `state` and each bucket from now on.
        state: First argument of `hook`.
    """
    automatic = _models[model]
    rename_comm_hook(model, hook, state)
    automatic.own = hook, state
    automatic.state.unbind(model)
    _log_once(f"a DistributedDataParallel has registered {hook.__qualname__}: it replaces the hook of {AUTOMATIC}")


def _log_once(text: str) -> None:
    """Logs a warning on rank 0, each text once; the default process group must be initialised."""
    if text not in _logged and dist.get_rank() == 0:
        log.warning(text)
    _logged.add(text)
