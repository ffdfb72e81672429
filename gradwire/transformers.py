"""gradwire in the Trainer of Transformers, tested with 5.20 to 5.23: the hook, and its state in checkpoints.

The Trainer hands callbacks the bare model, and no word of the folder that it resumes from: so this callback knows its
trainer. Each rank writes a file of its own into the checkpoint, beside the Trainer's own `rng_state_<rank>.pth`.
"""

import logging
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
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
    there is nothing to average, and it does nothing. Residuals follow the loss scale of `fp16=True`.

    Args:
        trainer: The callback is for this one; not kept alive.
        **options: Fields of `gradwire.Config` by name.

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
        """The hook's, from the start of training on: `callback.state.report()`."""
        self._model: DistributedDataParallel | None = None
        self._resumed: Path | None = None
        self._trainer = weakref.ref(trainer)
        load = trainer._load_optimizer_and_scheduler  # the one place that learns of the folder

        def load_and_note(checkpoint: str | None) -> None:
            load(checkpoint)
            self._resumed = Path(checkpoint) if checkpoint else None

        trainer._load_optimizer_and_scheduler = load_and_note

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Registers the hook, and loads its state where training resumes."""
        trainer = self._trainer()
        if args.world_size == 1 or trainer is None:
            log.warning("one process: there are no gradients to average, and gradwire's hook is not registered")
            return
        model = attaching.find_ddp(trainer.model_wrapped)
        if self.state is None or model is not self._model:
            self.state, self._model = attaching.attach(model, config=self.config), model
            attaching.watch_scaler(self.state, trainer.accelerator.scaler)
        resumed, self._resumed = self._resumed, None
        saved = _read(resumed) if resumed is not None else None
        if saved is not None:
            self.state.load_state_dict(saved)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Adds this rank's state to the checkpoint that the Trainer has just written."""
        trainer = self._trainer()
        saved = self.state.state_dict() if self.state is not None else {}
        if saved and trainer is not None:
            folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(saved, _file(folder, dist.get_rank()))


Callback = TransformersCallback
"""As its users write it: `gradwire.transformers.Callback`."""


def _file(folder: Path, rank: int) -> Path:
    return folder / f"gradwire_state_{rank}.pth"


def _read(folder: Path) -> dict[str, object] | None:
    """This rank's file; rank 0's, which says whether it was flushed, where more ranks resume than saved.

    Returns:
        None where the checkpoint was written without the callback, or without a compressor.

    Raises:
        FileNotFoundError: Other ranks have files.
    """
    found = next((file for rank in (dist.get_rank(), 0) if (file := _file(folder, rank)).exists()), None)
    everywhere: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found is not None)
    if found is not None:
        saved: dict[str, object] = torch.load(found, map_location="cpu", weights_only=True)
        return saved
    if any(everywhere):
        raise FileNotFoundError(
            f"{folder} has no {_file(folder, dist.get_rank()).name} on this machine, while other ranks have theirs: "
            "copy the whole checkpoint to each machine"
        )
    log.warning("%s holds no state of gradwire's hook: a compressor starts anew", folder)
    return None
