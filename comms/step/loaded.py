"""Checks that all ranks resume from the same saved state.

A rank that loaded nothing, or an older state, would send messages of other sizes than its peers expect. gloo checks
neither size nor kind of a message: it aborts the process if one is longer than expected, and waits until the timeout if
it is shorter. So the ranks compare what they loaded before the first collective that depends on it.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.errors import PeerError
from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.step.listeners import StepListener

log = logging.getLogger("gradwire")

REMEDY = "load on all ranks, before the same step, what they have saved at one moment"


class Loaded(Protocol):
    """Protocol of objects that describe which saved state they have loaded last, such as `Compression`."""

    @property
    def loaded(self) -> Mapping[str, str]:
        """Facts about the last loaded state, by name; equal on all ranks if they have loaded consistent states.

        A load replaces the mapping by a new one, so that its identity shows whether a state was loaded since.
        """


class LoadConsistencyCheck(StepListener):
    """Compares the loaded states of all ranks in the first step, and in the first step after each load.

    In the first step all ranks take part: with one small collective, or on CUDA through the store, because the host
    must not wait for the device. Later only the ranks that loaded a state take part, through the store. A rank that did
    not load is then waited for and named in the error, before its gradients can meet those of the others.

    Args:
        communicator: Connects the ranks; None (on CUDA) compares through the store only.
        source: The object that has loaded a state: its `loaded` is compared.
        consensus: Object by which the same ranks compare values, through the store.
        like: Rank whose loaded state must equal each rank's, by rank; None compares all with rank 0.
        compared: Value of `source.loaded` that was compared before and is skipped; None compares in the first step.
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
        """Compares the loaded states at the beginning of a step; see `compare`."""
        self.compare()

    def compare(self) -> None:
        """Compares the states that the ranks have loaded since the last call, and waits for the other ranks.

        Does nothing if this rank has loaded none since, except in the first step, in which all ranks compare. In
        elastic training the comparison is skipped if a rank fails meanwhile: the next all-reduce reports the failure.

        Raises:
            ValueError: On all ranks that compare: they loaded different states.
            RuntimeError: Another rank did not load a state before this step.
        """
        loaded = self._source.loaded
        if loaded is self._compared:
            return
        ranks = self._communicator if self._compared is None else None
        if ranks is None or ranks.device.type == "cuda" or self._differs(ranks, loaded):
            try:
                self._consensus.compare(loaded, REMEDY, self._like)
            except PeerError as error:  # only the store of an elastic job raises it
                log.debug("what the ranks have loaded is not compared: %s", error)
        self._compared = loaded

    def _differs(self, ranks: Communicator, loaded: Mapping[str, str]) -> bool:
        """Compares what each rank has loaded with what the rank that `like` names for it has; all call it, and wait.

        One small all-reduce carries a digest of each rank's state.

        Args:
            ranks: Communicator of the ranks.
            loaded: Description of this rank's loaded state.

        Returns:
            Whether any rank, not only this one, differs from its rank in `like`. False also if the all-reduce has
            failed, as the next one reports.
        """
        digest = hashlib.sha256(json.dumps(list(loaded.items())).encode()).digest()
        every = NumberExchange(ranks, [float(int.from_bytes(digest[:6], "big"))]).read()
        return every is not None and any(own != every[other] for own, other in zip(every, self._like, strict=True))
