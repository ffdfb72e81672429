"""Decides when a training step begins and ends, from what DDP and autograd report during a backward pass.

DDP calls the hook once a bucket and marks the last one. Autograd calls back when a backward pass has ended. A step ends
after both: DDP may launch its last bucket long before autograd ends; with `static_graph` it marks no last bucket in the
first step; and if the first bucket is reduced inside a checkpoint, the first callback belongs to the checkpoint's own
backward pass, not to the step.

A step that fails ends, too, and its error is raised behind DDP's own callback at the end of backward. An error that
left a comm hook, or a callback of autograd in front of DDP's, would end the pass in the middle of DDP's reducer: only
`finalize_backward` resets `require_finalize_`, which it does before it waits for the futures of the hook. Without that
every later forward pass raises "Expected to have finished reduction", or an INTERNAL ASSERT after the last bucket.

Since torch 2.15 a script may call DDP's `finalize_backward()` itself. Then what has to happen behind DDP's callback
happens behind that call.

Source: torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready`, `finalize_backward` and
`ensure_prior_reduction_finished` (torch 2.13 to 2.15).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain

from torch import nn

from gradwire.comms.bootstrap.compat import call_behind_finalization, follow_finalizations, queue_end_of_backward
from gradwire.comms.run.all_reduces import Bucket

TIMED_UNTIL, TIMED_EVERY, STEPS_IN_A_ROW = 23, 100, 3
"""End (exclusive) of the range of timed steps that a training begins with, period of the short ranges that follow, and
number of steps in each of those: steps 0 to 22 are timed, then 100 to 102, 200 to 202 and so on. `report()` and
`advise()` use only these steps on CUDA, because recording events costs host time. In a timed step uncompressed buckets
run on a side stream, even if a single all-reduce would not need one."""


def is_timed(step: int) -> bool:
    """Returns whether a step on CUDA is timed: the first 23, then the first three of every 100.

    Several steps in a row are, because the time of a step is taken from the end of one to the end of the next.

    Args:
        step: Number of backward passes before this one.
    """
    return step < TIMED_UNTIL or step % TIMED_EVERY < STEPS_IN_A_ROW


class StepState(Enum):
    """States of a training step, by the buckets that have arrived and the callback that autograd will make."""

    BETWEEN_STEPS = "no bucket since the end of the last step"
    IN_BACKWARD = "buckets arrive; autograd will call back at the end of backward"
    LAST_BUCKET_CAME = "all buckets have arrived; autograd will call back at the end of backward"
    NO_AUTOGRAD_CALLBACK = "buckets arrive, without a callback from autograd: the last bucket ends the step"


class BackwardTracker:
    """State machine of one model's steps. Call a method for each event; True means that the event ends the step.

    Attributes:
        state: State of the step.
        follows_error: Whether the step before has failed, and this one may work.
        kept: Types of the errors that are kept until DDP's own callback is through, and raised then; errors of other
            types are raised at once. Empty in elastic training, which repeats a failed step.
        marks_last_bucket: Whether DDP marks the last bucket of a step. With `static_graph` it does not in the first
            step, and waits for all futures before autograd reports the end of backward: no bucket may be deferred.
    """

    def __init__(self) -> None:
        follow_finalizations()
        self.state = StepState.BETWEEN_STEPS
        self.marks_last_bucket = False
        self.follows_error = False
        self.kept: tuple[type[Exception], ...] = (Exception,)
        self._arrived: tuple[Sequence[Bucket], ...] = ()
        self._error: Exception | None = None
        self._waits = False
        """Whether the script has yet to call `finalize_backward()` in this step."""
        self._behind: Callable[[], None] | None = None
        """Called when it has."""
        self._final = False
        """Whether every later step raises `_error` again, because something of the failed step was sent."""

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and has not ended."""
        return self.state is not StepState.BETWEEN_STEPS

    def begin(self, *arrived: Sequence[Bucket], autograd_calls: bool) -> None:
        """Starts a step at its first bucket; it has failed already if the step before failed after sending something.

        Args:
            arrived: Sequences that are empty now, to which the caller adds the buckets of the step before it sends
                them.
            autograd_calls: Whether autograd will call back at the end of backward.
        """
        self.state = StepState.IN_BACKWARD if autograd_calls else StepState.NO_AUTOGRAD_CALLBACK
        self._arrived, self._waits, self._behind = arrived, False, None
        if self._error is not None:
            # Else it would keep the frames of every step that raises it again.
            self._error.__traceback__ = None
            if not self._final:
                self._error, self.follows_error = None, True

    def follow(self, model: nn.Module | None) -> None:
        """Follows the script's call of `finalize_backward()` in the step that has begun, if it is to make one.

        Args:
            model: The DDP model; None if it is not known.
        """
        self._waits = model is not None and call_behind_finalization(model, self._finalized)

    def _finalized(self) -> None:
        self._waits, callback, self._behind = False, self._behind, None
        if callback is not None:
            callback()

    def call_behind_ddp(self, callback: Callable[[], None]) -> bool:
        """Calls `callback()` once DDP has copied the averages into the gradients; for when the backward pass has ended.

        DDP has queued its own callback by now, so a callback of autograd that is queued here runs after DDP's.

        Returns:
            False if no backward pass is running: then it is not called.
        """
        if not self._waits:
            return queue_end_of_backward(callback)
        self._behind = callback
        return True

    @property
    def has_failed(self) -> bool:
        """Whether the step has failed: nothing more is done for it, and `raise_error` raises its error at its end."""
        return self._error is not None

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Makes a context that keeps an error of its block: the error fails the step, and completes its open futures.

        `raise_error` raises it later. If a bucket of the step has arrived, every later step fails with the same error,
        because something may have been sent. Errors of other types than `kept` leave the context, and change nothing.
        """
        try:
            yield
        except self.kept as error:
            self._error, self._final = error, any(self._arrived)
            for bucket in chain(*self._arrived):
                bucket.give_up()

    def raise_error(self) -> None:
        """Raises the error of the step that ends, if the step has failed; inside of backward after DDP's own callback.

        If the script has yet to call `finalize_backward()`, that raises it. Else a callback of autograd does. DDP
        queues its own one only when the hook has returned for the last bucket, which may be later; so the callback
        queues a second one, and that one raises.

        Raises:
            Exception: The error, if no backward pass is running, and none is to be finalized.
        """
        self._arrived = ()
        if self._error is not None and self._waits:
            self._behind = partial(self._raise_behind, 0, self._error)
        elif self._error is not None:
            self._raise_behind(2, self._error)

    def _raise_behind(self, callbacks: int, error: Exception) -> None:
        """Raises an error in the last of `callbacks` callbacks of autograd, each of which is queued by the one before.

        It raises at once if `callbacks` is 0, or if no backward pass is running.
        """
        if not (callbacks and queue_end_of_backward(partial(self._raise_behind, callbacks - 1, error))):
            raise error

    def last_bucket_arrived(self) -> bool:
        """Records that DDP has passed the bucket that it marks as the last.

        Returns:
            Whether this ends the step: if no callback of autograd is to come. Otherwise the callback ends it.
        """
        self.marks_last_bucket = True
        ends = self.state is StepState.NO_AUTOGRAD_CALLBACK
        self.state = StepState.BETWEEN_STEPS if ends else StepState.LAST_BUCKET_CAME
        return ends

    def backward_ended(self, *, inside: bool = False) -> bool:
        """Records that autograd has called back at the end of a backward pass; returns whether the step ends with it.

        The pass may be the step's own, or one nested in it, such as that of a checkpoint. After a nested pass autograd
        does not call back again in this step, so the step then ends with its last bucket.

        Args:
            inside: Whether the pass is known to be nested. If False, a pass that ends before the last bucket counts as
                nested if DDP marks the last bucket, and otherwise as the step's own.

        Returns:
            Whether this ends the step; False also if no step is in progress.
        """
        if self.state is StepState.LAST_BUCKET_CAME or (self.in_step and not self.marks_last_bucket and not inside):
            self.state = StepState.BETWEEN_STEPS
            return True
        # A nested pass has used up the callback, so only the last bucket can end the step now.
        if self.in_step:
            self.state = StepState.NO_AUTOGRAD_CALLBACK
        return False
