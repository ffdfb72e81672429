"""Ranks go on from one moment: a rank that has loaded nothing, or what is older, would send other messages than others.

Between nodes of one rank each nothing looks at a message's size and kind: gloo ends the process where it is longer than
what is waited for, and waits until the time-out where it is shorter.
"""

from collections.abc import Mapping

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.compression import Compression
from gradwire.comms.step.listeners import StepListener

REMEDY = "load on all ranks, before the same step, what they have saved at one moment"


class LoadedAlike(StepListener):
    """Has all ranks compare what they have loaded: in the first step, and in the first one after a load.

    Args:
        compression: What is loaded into.
        consensus: All its ranks'.
    """

    def __init__(self, compression: Compression, consensus: Agreement) -> None:
        self._compression = compression
        self._consensus = consensus
        self._compared: Mapping[str, str] | None = None

    def step_began(self, steps: int) -> None:
        """Compares, through the store; nothing is in flight.

        Raises:
            ValueError: On all ranks: they have loaded unlike states.
            RuntimeError: A rank has not come to this step, or has loaded nothing before it.
        """
        loaded = self._compression.loaded
        if loaded is not self._compared:
            self._consensus.compare(loaded, REMEDY)
            self._compared = loaded
