"""Ranks go on from one moment: a rank that has loaded nothing, or what is older, would send other messages than others.

Between nodes of one rank each nothing looks at a message's size and kind: gloo ends the process where it is longer than
what is waited for, and waits until the time-out where it is shorter.
"""

import hashlib
import json
from collections.abc import Mapping

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.observe.share import Shared
from gradwire.comms.step.listeners import StepListener

REMEDY = "load on all ranks, before the same step, what they have saved at one moment"


class LoadedAlike(StepListener):
    """Has all ranks compare what they have loaded: in the first step, and in the first one after a load.

    In the first step all of them take part: by one small message, or on CUDA, where the host waits for no device,
    through the store. Later those alone take part that have loaded: through the store, where one that has not is waited
    for and named, and nothing of theirs meets its gradients.

    Args:
        communicator: Of the ranks.
        compression: What is loaded into.
        consensus: All its ranks'.
    """

    def __init__(self, communicator: Communicator, compression: Compression, consensus: Agreement) -> None:
        self._communicator = communicator
        self._compression = compression
        self._consensus = consensus
        self._compared: Mapping[str, str] | None = None

    def step_began(self, steps: int) -> None:
        """Compares; the host waits for the others, and nothing else is in flight.

        Raises:
            ValueError: On all ranks: they have loaded unlike states.
            RuntimeError: A rank has loaded nothing before this step.
        """
        loaded = self._compression.loaded
        if loaded is self._compared:
            return
        in_store = self._compared is not None or self._communicator.device.type == "cuda"
        if in_store or self._differs(loaded):
            self._consensus.compare(loaded, REMEDY)
        self._compared = loaded

    def _differs(self, loaded: Mapping[str, str]) -> bool:
        """Whether ranks have loaded unlike states; not where a rank was lost, which the first launch says."""
        digest = hashlib.sha256(json.dumps(list(loaded.items())).encode()).digest()
        rows = Shared(self._communicator, [float(int.from_bytes(digest[:6], "big"))]).read()
        return rows is not None and any(row != rows[0] for row in rows)
