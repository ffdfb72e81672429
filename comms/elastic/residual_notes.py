"""Publishes the norm of each rank's residuals, so that the others can report how much is lost if the rank fails."""

import json

from gradwire.comms.boundary.messages import Count, MessageError, MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.elastic.membership import Membership
from gradwire.comms.step.listeners import EndedStep, StepListener

NOTE_EVERY = 20
"""Number of steps between two publications. Each reads the residuals once, which costs a few thousandths of the work
that twenty steps do on them."""

_NOTE: MessageType[tuple[int, float]] = MessageType(tuple[Count, float], finite=False)
"""Number of a step, and the 2-norm of the residuals after it, which may be infinite after an overflow."""


class ResidualNotes(StepListener):
    """Publishes the norm of this rank's residuals every `NOTE_EVERY` steps.

    Args:
        membership: Membership whose ring thread writes the note to the store.
        communicator: Communicator of the gradients.
        compression: Compressor of the gradients.
    """

    def __init__(self, membership: Membership, communicator: Communicator, compression: Compression) -> None:
        self._membership = membership
        self._communicator = communicator
        self._compression = compression

    def step_ended(self, step: EndedStep) -> None:
        """Publishes the norm, if the number of the step is a multiple of `NOTE_EVERY`."""
        if step.number % NOTE_EVERY == 0:
            with self._communicator.exclusive():
                self._membership.note = json.dumps([step.number, self._compression.residual_norm()])


def norm_in_words(note: str | None) -> str:
    """Returns a clause for a log message that says how large the lost residuals of a failed rank were.

    Args:
        note: The note of a failed rank; None if it published none. One that is malformed tells nothing either.
    """
    try:
        return "its norm was {1:.3g} after step {0}".format(*_NOTE.read(note or ""))
    except MessageError:
        return "its norm is unknown"
