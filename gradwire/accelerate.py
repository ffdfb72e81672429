"""gradwire in Hugging Face Accelerate, tested with 1.10 and 1.15: the hook, and its state in what `save_state` writes.

`accelerator.register_for_checkpointing(state)` would keep rank 0's state alone, which no other rank can load. Here each
rank writes a file of its own into the checkpoint, and takes it back: nothing of it goes through the network.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from gradwire.comms import attach as attaching
from gradwire.comms.config import Config
from gradwire.comms.elastic.ddp import OnMembershipChange
from gradwire.comms.elastic.transfer import Carried
from gradwire.comms.hook import HookState

attaching.require("accelerate", (1, 10), (1, 15), "state = gradwire.attach(accelerator.prepare(model))")

from accelerate import Accelerator  # not before its version has been looked at


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    config: Config | None = None,
    extra_state: Sequence[Carried] = (),
    on_membership_change: OnMembershipChange | None = None,
    **options: object,
) -> HookState:
    """Registers the hook on a prepared model, and its state for `accelerator.save_state` and `load_state`.

    Call it before `load_state`, on every rank. Residuals follow the accelerator's loss scale, if there is one. Each
    rank saves and loads a file of its own; of several models with the hook, each has its files.

    Args:
        accelerator: Accelerator that prepared the model; its `save_state` and `load_state` then include the hook's
            state.
        model: Prepared model, as `accelerator.prepare` returned it.
        config: Options of the hook; None takes them from `options` and the environment.
        extra_state: Further objects with a `state_dict` that a joining rank receives, as for `gradwire.HookState`.
        on_membership_change: Function that is called after ranks left or joined, as for `gradwire.HookState`.
        **options: Fields of `gradwire.Config` by name.

    Returns:
        The state of the hook, for `report()` and such.

    Raises:
        TypeError: The model is not wrapped in DDP (FSDP, DeepSpeed), or an option has an unknown name.
        ValueError: The model has a hook already, or a value does not fit.
        RuntimeError: There is one process without torch.distributed, or a rank did not join.
    """
    state = attaching.attach(
        model, config=config, extra_state=extra_state, on_membership_change=on_membership_change, **options
    )
    attaching.watch_scaler(state, accelerator.scaler)
    number = _attached[accelerator] = _attached.get(accelerator, 0) + 1

    def place(folder: str) -> str:
        return f"{folder}/" if number == 1 else f"{folder}/model_{number}."

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        attaching.save_own(state, place(folder))

    def load(models: list[nn.Module], folder: str) -> None:
        attaching.load_own(state, place(folder))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state


_attached: "weakref.WeakKeyDictionary[Accelerator, int]" = weakref.WeakKeyDictionary()
"""Accelerator -> number of its models with the hook; each model has files of its own in a checkpoint."""
