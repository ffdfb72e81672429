"""Ties the tuner to a running job: watches the clock, applies what the tuner asks for, keeps what it finds."""

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.autotune.profile import Setting, fingerprint, load, save
from gradwire.comms.autotune.propose import PLANS, propose
from gradwire.comms.autotune.tune import Budget, StepSeen, Tuner
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.fusion import Fusion

LOG_COLUMNS = ("step", "kind", "setting", "plan", "chunks", "transfers", "steps", "seconds")


class Tuning:
    """Tuning of one model's communication on one rank.

    Args:
        communicator: Whose plan and chunks are tuned.
        fusion: Whose cuts are tuned.
        store: A store that all ranks share; a client of its own is made from it.
        name: Unique among the models of this store, equal on all ranks.
        model: A digest of the model's parameters.
        budget: How many steps it may take.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        communicator: Communicator,
        fusion: Fusion,
        store: Store,
        name: str,
        model: str,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config, cluster = communicator.config, communicator.cluster
        self._communicator = communicator
        self._fusion = fusion
        self._clock = clock
        self._ended = clock()
        keeps = config.tune and communicator.rank == 0
        self._file = Path(config.tune_profile) if config.tune_profile and keeps else None
        self._key: dict[str, object] = {
            "model": model,
            "world": communicator.size,
            "topology": fingerprint(cluster.locations),
            "device": communicator.device.type,
            "torch": torch.__version__,
        }
        incumbent = Setting(
            "as begun", (), (), fusion.plan.threshold_nbytes, communicator.routes.plan_name, communicator.routes.chunks
        )
        consensus = Consensus(
            PollingStore(store, config.timeout), communicator.rank, communicator.size, f"tune/{name}", config.timeout
        )
        plans = PLANS if config.plan == "auto" else ()
        self.tuner = Tuner(
            incumbent,
            lambda sizes, arrivals: propose(communicator.cluster, incumbent, sizes, arrivals, plans),
            consensus,
            known=load(self._file, self._key) if self._file else None,
            budget=budget,
            trials=config.tune,
            record=self._record,
            found=self._found,
        )
        self._applied = incumbent

    def step_ended(self, came: Sequence[float]) -> None:
        """Takes in the step that has just ended and applies the setting of the next; every rank, after every step.

        Args:
            came: When each of its buckets came, by this object's clock.
        """
        now = self._clock()
        arrivals = tuple(each - came[0] for each in came)
        seen = StepSeen(now - self._ended, self._fusion.last_sizes, arrivals)
        self._ended = now
        setting = self.tuner.step_ended(seen)
        if setting != self._applied:
            self._communicator.routes.choose(setting.plan, setting.chunks, "Chosen by the tuner.")
            self._fusion.change(setting.fusion)
            self._applied = setting

    def _found(self, setting: Setting, seconds: float) -> None:
        if self._file:
            save(self._file, self._key, setting, seconds)

    def _record(self, row: Sequence[object]) -> None:
        if self._file:
            log = self._file.with_suffix(".csv")
            new = not log.exists()
            with log.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([LOG_COLUMNS, row] if new else [row])
