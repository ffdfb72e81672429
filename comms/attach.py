"""Registers the hook with one call on a model that a framework has wrapped: finds the DDP model inside."""

import logging
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.automatic import automatic_of
from gradwire.comms.bootstrap.compat import COMPILED_INSIDE, comm_hook_name, registered_hook, why_no_ddp_hook
from gradwire.comms.checkpoint import Checkpoint, find_own, load_file, rank_file, save_file
from gradwire.comms.config import Config
from gradwire.comms.hook import HookState, comm_hook
from gradwire.comms.loss_scale import LossScaler

if TYPE_CHECKING:
    from gradwire.comms.elastic.ddp import OnMembershipChange
    from gradwire.comms.elastic.transfer import Carried

log = logging.getLogger("gradwire")

WRAPPED_AS = (COMPILED_INSIDE, "_forward_module")
"""Names of the attribute that holds the wrapped model, in torch.compile's module and in Lightning Fabric's."""


def attach(
    model: nn.Module,
    *,
    config: Config | None = None,
    extra_state: "Sequence[Carried]" = (),
    on_membership_change: "OnMembershipChange | None" = None,
    **options: object,
) -> HookState:
    """Registers gradwire's hook on a model that is wrapped in DDP, and returns the hook's state.

    If GRADWIRE_HOOK has given the model a hook, a call with other arguments than the model replaces it by a new one.

    Args:
        model: A DistributedDataParallel, or what `accelerator.prepare`, Lightning's `fabric.setup` or `torch.compile`
            have made of one; a Transformers Trainer's `trainer.model_wrapped`, a Lightning Trainer's
            `trainer.strategy.model`.
        config: The configuration; None reads `options` and the environment.
        extra_state: Objects whose state a process that joins an elastic job receives; see `HookState`.
        on_membership_change: Called after ranks have left or joined an elastic job; see `HookState`.
        **options: Fields of `Config` by name; they win over the environment.

    Returns:
        The state, bound to the model. If GRADWIRE_HOOK has given the model a hook, and the call has no arguments but
        the model, that hook's state.

    Raises:
        TypeError: There is no DDP model inside, or an option has an unknown name.
        ValueError: The model has another hook already, one that was registered by hand, be it gradwire's; a value does
            not fit, or differs between the ranks; or the model is one that `HookState` refuses.
        RuntimeError: torch.distributed is not initialised, or a rank did not join.
    """
    # Return the state of the automatic hook if the call asks for nothing else.
    ddp = find_ddp(model)
    automatic = automatic_of(ddp)
    if automatic is not None and config is None and on_membership_change is None and not extra_state and not options:
        return automatic
    found = comm_hook_name(ddp)
    if found and automatic is None:
        if registered_hook(ddp) is comm_hook:
            found, remedy = "gradwire's own", "keep the state that it was registered with, which holds its options"
        else:
            remedy = "register gradwire's hook in its place"
        raise ValueError(f"`model` has a hook already, {found}, and DDP takes one: {remedy}, or leave attach() out")
    state = HookState(ddp, config=config, extra_state=extra_state, on_membership_change=on_membership_change, **options)
    ddp.register_comm_hook(state, comm_hook)
    return state


def find_ddp(model: nn.Module) -> DistributedDataParallel:
    """Returns the DDP model inside a framework's wrapper.

    Args:
        model: The wrapper, or the DDP model itself.

    Raises:
        TypeError: There is no DDP model inside; the message says what to pass.
        RuntimeError: There is no DDP model inside, because torch.distributed is not initialised.
    """
    if not isinstance(model, nn.Module):
        hints = {"model_wrapped": "its `model_wrapped`", "strategy": "its `strategy.model`"}
        hint = next((text for name, text in hints.items() if hasattr(model, name)), "the model")
        raise TypeError(f"`model` is a {type(model).__name__}; wanted a torch.nn.Module: pass {hint}")
    inner = unwrap(model)
    if not isinstance(inner, DistributedDataParallel):
        raise _missing(inner)
    return inner


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers of frameworks and torch.compile, but does not look into a DDP model.

    Args:
        model: The outermost wrapper; returned itself if it is none.
    """
    inner = model
    while not isinstance(inner, DistributedDataParallel):
        children = dict(inner.named_children())
        name = next((name for name in WRAPPED_AS if name in children), None)
        if name is None:
            break
        inner = children[name]
    return inner


def _missing(model: nn.Module) -> TypeError | RuntimeError:
    """Makes the error about a module that is no DDP model, with the reason and what to pass instead; does not raise it.

    A RuntimeError if torch.distributed is not initialised, unless the model is sharded; otherwise a TypeError.
    """
    name = type(model).__name__
    if (why := why_no_ddp_hook(model)) is not None:
        return TypeError(f"`model` is {why}")
    if not dist.is_initialized():
        return RuntimeError(
            f"torch.distributed is not initialised, so `model`, a {name}, is not wrapped in DistributedDataParallel: "
            "start the script with torchrun, call torch.distributed.init_process_group() and wrap the model first"
        )
    inside = next((path for path, each in model.named_modules() if isinstance(each, DistributedDataParallel)), None)
    if inside is not None:
        return TypeError(f"`model` is a {name} that holds a DistributedDataParallel: pass `model.{inside}`")
    return TypeError(
        f"`model` is a {name}, not wrapped in DistributedDataParallel: pass what DistributedDataParallel(), "
        "accelerator.prepare() or fabric.setup() returned, trainer.model_wrapped (Transformers) or "
        "trainer.strategy.model (Lightning)"
    )


def watch_scaler(state: HookState, scaler: LossScaler | None) -> None:
    """Makes the compressor rescale its residuals whenever a framework's GradScaler changes its scale.

    Args:
        state: State of the hook; nothing is done if it has no compressor.
        scaler: The framework's GradScaler; None, if it does not scale the loss, does nothing.
    """
    if scaler is not None and state.config.compressor not in (None, "none"):
        state.watch(scaler)


def save_own(state: HookState, place: str, save: Callable[[Checkpoint, str], None] = save_file) -> None:
    """Writes this rank's file of a framework's checkpoint, unless the state is empty; waits for no other rank.

    Args:
        state: State of the hook.
        place: Prefix of the file's path; see `rank_file`.
        save: Function that writes a state dict to a path; called as `save(state_dict, path)`.
    """
    if saved := state.state_dict():
        save(saved, rank_file(place, dist.get_rank()))


def load_own(state: HookState, place: str, load: Callable[[str], dict[str, object]] = load_file) -> None:
    """Restores what `save_own` has written; all ranks of the default group call it.

    Args:
        state: State of the hook; restored in place. If no rank has a file, it stays empty, with a warning if it has a
            compressor.
        place: Prefix of the files' paths; see `rank_file`.
        load: Reads the file at a path; raises FileNotFoundError if there is none.

    Raises:
        FileNotFoundError: Other ranks have files, this one has none.
        ValueError: A rank's file cannot be read, raised on all ranks; or this rank's does not fit the state.
    """
    saved = find_own(place, load)
    if saved is not None:
        state.load_state_dict(saved)
    elif state.config.compressor not in (None, "none"):
        log.warning("%s holds no state of gradwire's hook: a compressor starts without residuals", place.rstrip("./"))


def require(package: str, oldest: tuple[int, int], newest: tuple[int, int], instead: str) -> None:
    """Refuses a framework that is missing or older than what its adapter is tested with; warns of a newer one.

    Args:
        package: Name of the framework's package in the package index.
        oldest: (major, minor) of the oldest version that is tested.
        newest: (major, minor) of the newest version that is tested.
        instead: Line of code that does the same without the adapter, for messages.

    Raises:
        ModuleNotFoundError: The package is not installed.
        ImportError: The package is older than `oldest`.
    """
    command = f"pip install '{package}>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"gradwire.{package} needs {package}, which is not installed: {command}", name=package
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else oldest
    tested = f"gradwire.{package} is tested with {package} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    if version < oldest:
        raise ImportError(f"{tested}, found {found}: {command}; or write, without the adapter: {instead}", name=package)
    if version > newest:
        log.warning("%s, found %s: should it fail, write, without the adapter: %s", tested, found, instead)
