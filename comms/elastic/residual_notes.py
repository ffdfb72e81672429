"""How much a compressor holds back on each rank: word that others have of it where the rank is lost."""

import json

from gradwire.comms.boundary.messages import Count, MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.elastic.membership import Membership
from gradwire.comms.step.listeners import EndedStep, StepListener

NOTE_EVERY = 20
"""Steps after which each rank leaves word. It reads its residuals once, some thousandths of what twenty steps do with
them."""


_NOTE: MessageType[tuple[int, float]] = MessageType(tuple[Count, float], finite=False)
"""A step, and the norm of the residuals then, which may have overflowed."""


class ResidualNotes(StepListener):
    """Leaves word of the norm of one rank's residuals.

    Args:
        membership: Its pulse carries the word to the others.
        communicator: Of the gradients.
        compression: Of the same.
    """

    def __init__(self, membership: Membership, communicator: Communicator, compression: Compression) -> None:
        self._membership = membership
        self._communicator = communicator
        self._compression = compression

    def step_ended(self, step: EndedStep) -> None:
        """Leaves word now and then."""
        if step.number % NOTE_EVERY == 0:
            with self._communicator.exclusive():
                self._membership.note = json.dumps([step.number, self._compression.residual_norm()])


def norm_in_words(note: str | None) -> str:
    """What a rank has left word of, for a message; None where it has left none."""
    return "its norm is unknown" if note is None else "its norm was {1:.3g} after step {0}".format(*_NOTE.read(note))
