"""gradwire in Hugging Face Accelerate, tested with 1.10 and 1.15: the hook, and its state in what `save_state` writes.

`accelerator.register_for_checkpointing(state)` alone would keep rank 0's state, which no other rank can load: what is
registered here gathers all of them when it is saved, and each rank takes its own part back.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from gradwire.comms import attach as attaching
from gradwire.comms.checkpoint import Checkpoint
from gradwire.comms.config import Config
from gradwire.comms.elastic.transfer import Carried
from gradwire.comms.hook import HookState, OnChange

attaching.require("accelerate", (1, 10), (1, 15), "state = gradwire.attach(accelerator.prepare(model))")

from accelerate import Accelerator  # not before its version has been looked at


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    config: Config | None = None,
    carries: Sequence[Carried] = (),
    on_change: OnChange | None = None,
    **options: object,
) -> HookState:
    """Registers the hook on a prepared model, and its state for `accelerator.save_state` and `load_state`.

    Call it before `load_state`. Residuals follow the accelerator's loss scale, if there is one.

    Args:
        accelerator: That prepared the model.
        model: What `accelerator.prepare` returned.
        config: As for `gradwire.HookState`.
        carries: As for `gradwire.HookState`.
        on_change: As for `gradwire.HookState`.
        **options: Fields of `gradwire.Config` by name.

    Raises:
        TypeError: The model is not wrapped in DDP (one process, FSDP, DeepSpeed), or an option has an unknown name.
        ValueError: The model has a hook already, or a value does not fit.
    """
    state = attaching.attach(model, config=config, carries=carries, on_change=on_change, **options)
    attaching.watch_scaler(state, accelerator.scaler)
    everywhere = accelerator.project_configuration.save_on_each_node
    accelerator.register_for_checkpointing(OfAllRanks(state, everywhere))
    return state


class OfAllRanks:
    """What Accelerate saves and loads: the states of all ranks in one file, which rank 0 writes.

    Args:
        state: This rank's.
        everywhere: Whether a rank of each node writes, as `ProjectConfiguration(save_on_each_node=True)` says.
    """

    def __init__(self, state: HookState, everywhere: bool = False) -> None:
        self.state = state
        self.everywhere = everywhere

    def state_dict(self) -> Checkpoint:
        """See `HookState.gathered_state_dict`; Accelerate calls it on all ranks."""
        return self.state.gathered_state_dict(on_all_ranks=self.everywhere)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `HookState.load_state_dict`."""
        self.state.load_state_dict(state)
