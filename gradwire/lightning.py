"""gradwire in Lightning's Trainer, tested with 2.5 and 2.6: the hook, and its state beside the Trainer's checkpoints.

Lightning registers the hooks that `DDPStrategy(ddp_comm_hook=...)` names on CUDA devices only, and says nothing of it
elsewhere; this callback registers gradwire's on every device. For Fabric, `gradwire.attach(fabric_module)` is enough.
"""

import logging
import weakref
from pathlib import Path
from typing import Any

from gradwire.comms import attach as attaching
from gradwire.comms.checkpoint import rank_file
from gradwire.comms.config import Config
from gradwire.comms.hook import HookState

attaching.require("lightning", (2, 5), (2, 6), "gradwire.attach(trainer.strategy.model), in on_fit_start")

from lightning import pytorch  # not before its version has been looked at

log = logging.getLogger("gradwire")


class LightningCallback(pytorch.Callback):
    """Registers gradwire's hook when training starts: `Trainer(strategy="ddp", callbacks=[Callback()])`.

    Each rank writes a file of its own beside each checkpoint, `epoch=1.ckpt.gradwire_state_0.pth`, through the
    Trainer's checkpoint plugin, and `fit(ckpt_path=...)` restores it: nothing of it goes through the network. With one
    process there is nothing to average, and it only warns. Residuals follow the loss scale of precision "16-mixed".

    Args:
        **options: Fields of `gradwire.Config` by name.

    Attributes:
        config: The options, completed from the environment.
        state: State of the hook, for `callback.state.report()`; None before training starts and with one process.

    Raises:
        TypeError: An option has an unknown name.
        ValueError: A value does not fit.
    """

    def __init__(self, **options: object) -> None:
        self.config = Config.from_env(**options)
        self.state: HookState | None = None
        self._accompanied: weakref.ref[pytorch.strategies.DDPStrategy] | None = None
        self._saves = False
        """True while the Trainer writes a whole checkpoint, and not the weights alone."""

    def on_fit_start(self, trainer: pytorch.Trainer, pl_module: pytorch.LightningModule) -> None:
        """Registers the hook on the model that Lightning has wrapped, and loads this rank's file if training resumes.

        With one process it only warns. A checkpoint without gradwire's files is no error: a compressor then starts
        without residuals, with a warning.

        Raises:
            TypeError: The Trainer's strategy is not DDP.
            ValueError: The model has a hook already, or this rank's file does not fit the options.
            FileNotFoundError: This rank has no file, but others have.
        """
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
        self._accompany(strategy)
        if trainer.ckpt_path is not None:
            link = Path(trainer.ckpt_path)  # ModelCheckpoint(save_last="link") makes such to what has the files
            place = link.resolve() if link.is_symlink() else trainer.ckpt_path
            attaching.load_own(self.state, f"{place}.", strategy.checkpoint_io.load_checkpoint)

    def on_save_checkpoint(
        self, trainer: pytorch.Trainer, pl_module: pytorch.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Marks that the next file written is a whole checkpoint, so that this rank's state is written beside it."""
        self._saves = True

    def _accompany(self, strategy: pytorch.strategies.DDPStrategy) -> None:
        """Wraps a strategy's methods that write and remove checkpoints, so that they do the same with this rank's file.

        The strategy is changed in place; one that is wrapped already is left as it is.
        """
        if self._accompanied is not None and self._accompanied() is strategy:
            return
        self._accompanied = weakref.ref(strategy)
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_both(checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
            save(checkpoint, filepath, storage_options)
            if self._saves and self.state is not None:
                attaching.save_own(self.state, f"{filepath}.", strategy.checkpoint_io.save_checkpoint)
            self._saves = False

        def remove_both(filepath: str | Path) -> None:
            remove(filepath)
            strategy.checkpoint_io.remove_checkpoint(rank_file(f"{filepath}.", strategy.global_rank))

        strategy.save_checkpoint, strategy.remove_checkpoint = save_both, remove_both


Callback = LightningCallback
"""Public name of the callback: `gradwire.lightning.Callback`."""
