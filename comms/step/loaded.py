"""Ranks go on from one moment: a rank that has loaded nothing, or what is older, would send other messages than others.

Between nodes of one rank each nothing looks at a message's size and kind: gloo ends the process where it is longer than
what is waited for, and waits until the time-out where it is shorter.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.errors import PeerError
from gradwire.comms.observe.share import Shared
from gradwire.comms.step.listeners import StepListener

log = logging.getLogger("gradwire")

REMEDY = "load on all ranks, before the same step, what they have saved at one moment"


class Loaded(Protocol):
    """What states are loaded into."""

    @property
    def loaded(self) -> Mapping[str, str]:
        """What ranks must have alike of the state that was loaded last, by name: another mapping after each load."""


class LoadedAlike(StepListener):
    """Has all ranks compare what they have loaded: in the first step, and in the first one after a load.

    In the first step all of them take part: by one small message, or on CUDA, where the host waits for no device,
    through the store. Later those alone take part that have loaded: through the store, where one that has not is waited
    for and named, and nothing of theirs meets its gradients.

    Args:
        communicator: Of the ranks; None where they have none, on CUDA.
        source: What is loaded into.
        consensus: All its ranks'.
        like: For each rank the one that it must have loaded the same as; None: rank 0 for all.
        compared: What has been loaded already, and is not compared; None: all of them compare in the first step.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        source: Loaded,
        consensus: Agreement,
        like: Sequence[int] | None = None,
        compared: Mapping[str, str] | None = None,
    ) -> None:
        self._communicator = communicator
        self._source = source
        self._consensus = consensus
        self._like = like or [0] * consensus.size
        self._compared = compared

    def step_began(self, steps: int) -> None:
        """As `compare`."""
        self.compare()

    def compare(self) -> None:
        """Compares what has been loaded since the last call; the host waits for the others, and nothing is in flight.

        In elastic training nothing is compared where a rank is lost meanwhile, which the first launch says.

        Raises:
            ValueError: On all ranks: they have loaded unlike states.
            RuntimeError: A rank has loaded nothing before this step.
        """
        loaded = self._source.loaded
        if loaded is self._compared:
            return
        ranks = self._communicator if self._compared is None else None
        if ranks is None or ranks.device.type == "cuda" or self._differs(ranks, loaded):
            try:
                self._consensus.compare(loaded, REMEDY, self._like)
            except PeerError as error:  # from the store of an epoch alone
                log.debug("what the ranks have loaded is not compared: %s", error)
        self._compared = loaded

    def _differs(self, ranks: Communicator, loaded: Mapping[str, str]) -> bool:
        """Whether ranks have loaded unlike states; not where a rank was lost, which the first launch says."""
        digest = hashlib.sha256(json.dumps(list(loaded.items())).encode()).digest()
        rows = Shared(ranks, [float(int.from_bytes(digest[:6], "big"))]).read()
        return rows is not None and any(row != rows[other] for row, other in zip(rows, self._like, strict=True))
