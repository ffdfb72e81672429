"""Prepares the compressor for each step of a DDP model, and commits or drops what the step left in it."""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.fusion import Fusion
from gradwire.comms.resume import Resume
from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.step.listeners import EndedStep, Grouping, StepListener


class GroupsBuckets(Protocol):
    """Protocol of sessions: the part that decides which buckets are joined into one all-reduce.

    Attributes:
        fusion: Grouping of buckets into all-reduces, used in most steps.
        grouping: Grouping of the present step: `fusion`, or the one that a saved state prescribes.
    """

    fusion: Fusion
    grouping: Grouping


class CompressedSteps(StepListener):
    """Prepares the compressor when a step begins, and commits or drops its changes of state when the step ends.

    Args:
        session: The session whose grouping a resumed step replaces; not kept alive, as it owns this listener.
        communicator: Communicator of the session.
        compression: The compressor of all steps.
    """

    def __init__(self, session: GroupsBuckets, communicator: Communicator, compression: Compression) -> None:
        self._session: GroupsBuckets = weakref.proxy(session)
        self._communicator = communicator
        self._compression = compression

    def step_began(self, steps: int) -> None:
        """Rescales residuals to the GradScaler's scale, if one is watched.

        In the first step after a load it also has the buckets grouped as in the step before the checkpoint.
        """
        if self._compression.loss_scale.follows_scaler:
            with self._communicator.exclusive():
                self._compression.loss_scale.follow()
        saved = self._compression.take_saved_all_reduces()
        if saved is not None:
            self._session.grouping = Resume(saved, self._session.fusion)

    def step_ended(self, step: EndedStep) -> None:
        """Commits the compressor's new state, or drops it if the averages are not finite.

        On a CPU it waits for all buckets. On CUDA the device decides, and the host does not wait; an error here aborts
        the collectives of all ranks, as an error in one of them does.

        Raises:
            BaseException: The error of a bucket's all-reduce, on a CPU; or what the compressor raises.
        """
        if self._communicator.device.type != "cuda":
            self._compression.end_step([*step.buckets, *step.sparse], step.reduced_layouts)
            return
        try:
            with self._communicator.exclusive():
                extremes = [*self._communicator.executor.extremes(), *_sparse_extremes(step.sparse)]
                self._compression.end_step_on_device(extremes, step.reduced_layouts)
        except Exception as error:
            # This rank's residuals may differ from those that the other ranks assume, for example if memory ran out.
            self._communicator.executor.interrupt(error)
            raise


def _sparse_extremes(buckets: Sequence[Bucket]) -> list[Tensor]:
    """Returns the least and the largest value of each sparse average, as 0-dim tensors: finite if all values are.

    A bucket without values has none.
    """
    values = [bucket.result().wait()._values() for bucket in buckets]
    return [extreme for value in values if value.numel() for extreme in torch.aminmax(value)]
