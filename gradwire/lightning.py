"""gradwire in Lightning's Trainer, tested with 2.5 and 2.6: the hook, and its state in the Trainer's checkpoints.

Lightning registers the hooks that `DDPStrategy(ddp_comm_hook=...)` names on CUDA devices only, and says nothing of it
elsewhere; this callback registers gradwire's on every device. For Fabric, `gradwire.attach(fabric_module)` is enough.
"""

import logging
from collections.abc import Mapping

from gradwire.comms import attach as attaching
from gradwire.comms.config import Config
from gradwire.comms.hook import HookState

attaching.require("lightning", (2, 5), (2, 6), "gradwire.attach(trainer.strategy.model), in on_fit_start")

from lightning import pytorch  # not before its version has been looked at

log = logging.getLogger("gradwire")


class LightningCallback(pytorch.Callback):
    """Registers gradwire's hook when training starts: `Trainer(strategy="ddp", callbacks=[Callback()])`.

    The states of all ranks are in the checkpoints that the Trainer writes, and `fit(ckpt_path=...)` restores them. With
    one process there is nothing to average, and it does nothing. Residuals follow the loss scale of precision
    "16-mixed".

    Args:
        **options: Fields of `gradwire.Config` by name.

    Raises:
        TypeError: An option has an unknown name.
        ValueError: A value does not fit.
    """

    def __init__(self, **options: object) -> None:
        self.config = Config.from_env(**options)
        self.state: HookState | None = None
        """The hook's, from the start of training on: `callback.state.report()`."""
        self._loaded: dict[str, object] = {}

    def on_fit_start(self, trainer: pytorch.Trainer, pl_module: pytorch.LightningModule) -> None:
        """Registers the hook; Lightning has wrapped the model and read the checkpoint."""
        if trainer.world_size == 1:
            log.warning("one process: there are no gradients to average, and gradwire's hook is not registered")
            return
        strategy = trainer.strategy
        if not isinstance(strategy, pytorch.strategies.DDPStrategy):
            raise TypeError(
                f"`strategy` is {type(strategy).__name__}, whose gradients take no DDP hook: wanted "
                'Trainer(strategy="ddp"), or leave the callback out'
            )
        self.state = attaching.attach(strategy.model, config=self.config)
        attaching.watch_scaler(self.state, getattr(strategy.precision_plugin, "scaler", None))
        if self._loaded:
            self.state.load_state_dict(self._loaded)
            self._loaded = {}

    def state_dict(self) -> dict[str, object]:
        """See `HookState.gathered_state_dict`; Lightning calls it on all ranks, and rank 0 writes."""
        return dict(self.state.gathered_state_dict()) if self.state is not None else dict(self._loaded)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Keeps what Lightning has read until training starts."""
        self._loaded = dict(state_dict)


Callback = LightningCallback
"""As its users write it: `gradwire.lightning.Callback`."""
