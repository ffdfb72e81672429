"""gradwire in the Trainer of Transformers, tested with 5.20 to 5.23: the hook, and its state in checkpoints.

The Trainer hands callbacks the bare model, and no word of the folder that it resumes from: so this callback knows its
trainer. Each rank writes a file of its own into the checkpoint, beside the Trainer's own `rng_state_<rank>.pth`.
"""

import logging
import weakref
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from gradwire.comms import attach as attaching
from gradwire.comms.config import Config
from gradwire.comms.hook import HookState

attaching.require(
    "transformers",
    (5, 20),
    (5, 23),
    "gradwire.attach(trainer.model_wrapped), in the on_train_begin of a TrainerCallback",
)

from transformers import (  # not before its version has been looked at
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

log = logging.getLogger("gradwire")


class TransformersCallback(TrainerCallback):
    """Registers gradwire's hook when training starts: `trainer.add_callback(Callback(trainer, compressor="int8"))`.

    Every checkpoint holds each rank's state, and `train(resume_from_checkpoint=...)` restores it. With one process
    there is nothing to average, and it only warns. Residuals follow the loss scale of `fp16=True`.

    Args:
        trainer: Trainer that the callback is added to; its method that loads the optimizer is wrapped, to learn which
            checkpoint is resumed. Only a weak reference is kept.
        **options: Fields of `gradwire.Config` by name.

    Attributes:
        config: The options, completed from the environment.
        state: State of the hook, for `callback.state.report()`; None before training starts and with one process.

    Raises:
        TypeError: An option has an unknown name, or `trainer` is no Trainer.
        ValueError: A value does not fit.
    """

    def __init__(self, trainer: Trainer, **options: object) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"`trainer` is a {type(trainer).__name__}; wanted the Trainer: "
                "trainer.add_callback(gradwire.transformers.Callback(trainer))"
            )
        self.config = Config.from_env(**options)
        self.state: HookState | None = None
        self._model: DistributedDataParallel | None = None
        self._resumed: Path | None = None
        self._trainer = weakref.ref(trainer)
        load = trainer._load_optimizer_and_scheduler  # the one place that learns of the folder

        def load_and_note(folder: str | None) -> None:
            load(folder)
            self._resumed = Path(folder) if folder else None

        trainer._load_optimizer_and_scheduler = load_and_note

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Registers the hook, and loads this rank's file if training resumes; with one process it only warns.

        A second `train()` of the same model keeps its hook. A checkpoint without gradwire's files is no error: a
        compressor then starts without residuals, with a warning.

        Raises:
            TypeError: The Trainer has not wrapped the model in DDP.
            ValueError: The model has a hook already, or this rank's file does not fit the options.
            FileNotFoundError: This rank has no file, but others have.
        """
        trainer = self._trainer()
        if args.world_size == 1 or trainer is None:
            log.warning("one process: there are no gradients to average, and gradwire's hook is not registered")
            return
        model = attaching.find_ddp(trainer.model_wrapped)
        if self.state is None or model is not self._model:
            self.state, self._model = attaching.attach(model, config=self.config), model
            attaching.watch_scaler(self.state, trainer.accelerator.scaler)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            attaching.load_own(self.state, f"{resumed}/")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Writes this rank's hook state, such as a compressor's residuals, into the folder of the newest checkpoint.

        The Trainer calls it on every rank after it has written that checkpoint. Each rank has a file of its own; none
        if its state is empty, or no hook is registered.
        """
        trainer = self._trainer()
        if self.state is not None and trainer is not None:
            folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{state.global_step}"
            attaching.save_own(self.state, f"{folder}/")


Callback = TransformersCallback
"""Public name of the callback: `gradwire.transformers.Callback`."""
