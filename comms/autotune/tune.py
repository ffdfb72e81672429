"""Finds, while training runs, the cuts, plan and number of chunks with which this model's step is shortest here.

Profile: when do the buckets arrive? Propose: the best cuts for those arrivals (`propose.py`), their neighbours, the
plans and chunk counts that the cost model ranks first. Try: successive halving on the measured step, the slowest rank
counting. Confirm: the winner against the setting that it would replace, in turns; unless it wins by a margin it is
discarded. Then listen: where the step grows for good, begin again.

All of it is a program in steps: every rank runs the same one, so they try the same setting at the same step, and
communicate only where a decision is due. Nothing here changes what is computed: compression is never switched on, off
or over.

Source: successive halving: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016.
"""

import csv
import logging
import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from gradwire.comms.autotune.profile import TunerSetting, fingerprint, load, save
from gradwire.comms.autotune.propose import PLANS, propose
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.fusion import Fusion
from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.streams import Clock, HostClock, Mark

log = logging.getLogger("gradwire")

LOG_COLUMNS = ("step", "kind", "setting", "plan", "chunks", "transfers", "steps", "seconds")
"""The log columns of the CSV file beside a profile: one row for each setting that was measured."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many steps tuning may take.

    Attributes:
        settle_steps: Steps with equal buckets before anything is measured; DDP rebuilds its buckets after the first.
        profile_steps: Steps that arrivals are profiled for.
        trial_steps: Steps of each setting in the first round.
        uncounted_steps: Of those, how many at the beginning are not counted.
        confirm_turns: How often winner and incumbent take turns at the end.
        listen_steps: Steps between two looks at whether the step has grown.
        candidates: Settings tried at most, the incumbent included.
        margin: Share of the step that a setting must save to replace the incumbent.
        drift: Share by which the step must have grown to begin again.
        retunes: How often at most.
    """

    settle_steps: int = 2
    profile_steps: int = 5
    trial_steps: int = 4
    uncounted_steps: int = 1
    confirm_turns: int = 3
    listen_steps: int = 200
    candidates: int = 8
    margin: float = 0.02
    drift: float = 0.2
    retunes: int = 3


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What one rank saw of one step.

    Attributes:
        seconds: From the end of the step before to the end of this one.
        sizes: Bytes of its buckets.
        arrivals: When each arrived, in seconds from the first.
    """

    seconds: float
    sizes: tuple[int, ...]
    arrivals: tuple[float, ...]


Program = Generator[TunerSetting, StepSeen, None]
Propose = Callable[[tuple[int, ...], list[float]], list[TunerSetting]]
"""(sizes of the buckets, when they arrive) -> settings to try, the most promising first."""


class Tuner:
    """One rank's tuner.

    Args:
        incumbent: The setting that training begins with.
        propose: Called on rank 0 only.
        consensus: All ranks' of the group.
        known: A setting from an earlier run, tried before any search; None where there is none.
        budget: How many steps it may take.
        trials: Try the proposals; else the first is taken as it is, and nothing is tried or listened for.
        record: Called with each row of the log.
        found: Called once with the setting that won and its step's seconds.
    """

    def __init__(
        self,
        incumbent: TunerSetting,
        propose: Propose,
        consensus: Agreement,
        *,
        known: TunerSetting | None = None,
        budget: Budget | None = None,
        trials: bool = True,
        record: Callable[[Sequence[object]], None] = lambda row: None,
        found: Callable[[TunerSetting, float], None] = lambda setting, seconds: None,
    ) -> None:
        self._incumbent = incumbent
        self._propose = propose
        self._consensus = consensus
        self._known = known
        self._budget = budget or Budget()
        self._trials = trials
        self._record = record
        self._found = found
        self._step = 0
        self.tuning = True
        self._program = self._run()
        self.setting = next(self._program)

    def step_ended(self, seen: StepSeen) -> TunerSetting:
        """Takes in a step and returns the setting of the next; every rank after every step."""
        self._step += 1
        self.setting = self._program.send(seen)
        return self.setting

    def _run(self) -> Program:
        for _ in range(1 + self._budget.retunes):
            self.tuning = True
            began = self._step
            sizes = yield from self._settle()
            arrivals = yield from self._profile(len(sizes))
            candidates = self._candidates(sizes, arrivals)
            if not self._trials:
                self._incumbent = candidates[min(1, len(candidates) - 1)]
                self._row("calculated", self._incumbent, 0.0, 0)
                break
            self._known = None
            winner = yield from self._halve(candidates)
            yield from self._confirm(winner)
            self.tuning = False
            log.info("tuning took %d steps; keeping %s", self._step - began, self._incumbent.label)
            yield from self._listen()
        self.tuning = False
        while True:
            yield self._incumbent

    def _settle(self) -> Generator[TunerSetting, StepSeen, tuple[int, ...]]:
        sizes: tuple[int, ...] = ()
        same = 0
        while same < self._budget.settle_steps:
            seen = yield self._incumbent
            same = same + 1 if seen.sizes == sizes and sizes else 0
            sizes = seen.sizes
        return sizes

    def _profile(self, count: int) -> Generator[TunerSetting, StepSeen, list[float]]:
        steps = []
        for _ in range(self._budget.profile_steps):
            seen = yield self._incumbent
            steps.append(seen.arrivals)
        usual = [statistics.median(step[index] for step in steps if len(step) == count) for index in range(count)]
        return self._slowest(usual)

    def _candidates(self, sizes: tuple[int, ...], arrivals: list[float]) -> list[TunerSetting]:
        def choose(_: object) -> object:
            wanted = [self._incumbent, *([self._known] if self._known else []), *self._propose(sizes, arrivals)]
            distinct: dict[tuple[object, ...], TunerSetting] = {}
            for setting in wanted:
                distinct.setdefault(_what(setting), setting)
            return [asdict(setting) for setting in distinct.values()][: self._budget.candidates]

        decided = self._consensus.decide(None, choose)
        assert isinstance(decided, list)
        return [TunerSetting.of(values) for values in decided]

    def _halve(self, candidates: list[TunerSetting]) -> Generator[TunerSetting, StepSeen, TunerSetting]:
        """Tries all, drops the slower half, tries the rest twice as long, ... until one remains."""
        steps = self._budget.trial_steps
        while len(candidates) > 1:
            own = []
            for setting in candidates:
                own.append((yield from self._try(setting, steps)))
            slowest = self._slowest(own)
            ranked = sorted(range(len(candidates)), key=slowest.__getitem__)
            for index in range(len(candidates)):
                self._row("trial", candidates[index], slowest[index], steps)
            candidates = [candidates[index] for index in ranked[: (len(candidates) + 1) // 2]]
            steps *= 2
        return candidates[0]

    def _confirm(self, winner: TunerSetting) -> Generator[TunerSetting, StepSeen, None]:
        """Winner and incumbent in turns, so that a slow moment of the network affects both alike."""
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(self._budget.confirm_turns):
            ours.append((yield from self._try(self._incumbent, self._budget.trial_steps)))
            theirs.append((yield from self._try(winner, self._budget.trial_steps)))
        (*each,) = self._slowest(ours + theirs)
        before, after = (statistics.median(half) for half in (each[: len(ours)], each[len(ours) :]))
        better = after < before * (1 - self._budget.margin) and _what(winner) != _what(self._incumbent)
        self._row("incumbent", self._incumbent, before, self._budget.trial_steps)
        self._row("kept" if better else "refused", winner, after, self._budget.trial_steps)
        if better:
            self._incumbent = winner
        self._found(self._incumbent, after if better else before)

    def _listen(self) -> Generator[TunerSetting, StepSeen, None]:
        """Returns when the step has grown for two looks in a row on the slowest rank."""
        reference: float | None = None
        grown = 0
        while grown < 2:
            times = []
            for _ in range(self._budget.listen_steps):
                times.append((yield self._incumbent).seconds)
            (now,) = self._slowest([statistics.median(times)])
            reference = now if reference is None else min(reference, now)
            grown = grown + 1 if now > reference * (1 + self._budget.drift) else 0
        self._row("drift", self._incumbent, now, self._budget.listen_steps)

    def _try(self, setting: TunerSetting, steps: int) -> Generator[TunerSetting, StepSeen, float]:
        """The median step with a setting; the first step still ends transfers of the setting before."""
        times = []
        for _ in range(steps):
            times.append((yield setting).seconds)
        return statistics.median(times[self._budget.uncounted_steps :] or times)

    def _slowest(self, own: list[float]) -> list[float]:
        """The slowest rank's figure of each measurement."""
        decided = self._consensus.decide(own, lambda ranks: [max(each) for each in zip(*_rows(ranks), strict=True)])
        return _rows([decided])[0]

    def _row(self, kind: str, setting: TunerSetting, seconds: float, steps: int) -> None:
        self._record((self._step, kind, setting.label, setting.plan, setting.chunks, len(setting.cuts), steps, seconds))


def _rows(values: Sequence[object]) -> list[list[float]]:
    """Lists of numbers as the consensus carries them."""
    rows = []
    for value in values:
        assert isinstance(value, list)
        rows.append([float(number) for number in value])
    return rows


def _what(setting: TunerSetting) -> tuple[object, ...]:
    """What a setting does, whatever it is called."""
    return setting.cuts, setting.threshold_nbytes if not setting.sizes else 0, setting.plan, setting.chunks


class Tuning(StepListener):
    """Tuning of one model's communication on one rank.

    Args:
        communicator: Whose plan and chunks are tuned.
        fusion: Whose cuts are tuned.
        store: A store that all ranks share; a client of its own is made from it.
        name: Unique among the models of this store, equal on all ranks.
        model: A digest of the model's parameters.
        clock: The one that arrivals are given by; where it is a device's, each step is looked at a step later.
    """

    wants_arrivals = True

    def __init__(
        self,
        communicator: Communicator,
        fusion: Fusion,
        store: Store,
        name: str,
        model: str,
        clock: Clock | None = None,
    ) -> None:
        config, cluster = communicator.config, communicator.cluster
        self._communicator = communicator
        self._fusion = fusion
        self._clock = clock or HostClock()
        self._ended = self._clock.now()
        self._unread: deque[tuple[Mark, Mark, tuple[int, ...], Sequence[Mark]]] = deque()
        lag = self._clock.lag
        plain = Budget()
        budget = replace(plain, trial_steps=plain.trial_steps + lag, uncounted_steps=plain.uncounted_steps + lag)
        keeps = config.tune and communicator.rank == 0
        self._file = Path(config.tune) if isinstance(config.tune, str) and keeps else None
        self._key: dict[str, object] = {
            "model": model,
            "world": communicator.size,
            "topology": fingerprint(cluster.locations),
            "device": communicator.device.type,
            "torch": torch.__version__,
        }
        incumbent = TunerSetting(
            "as begun",
            (),
            (),
            fusion.plan.threshold_nbytes,
            communicator.routes.chooser.plan_name,
            communicator.routes.chooser.chunks,
        )
        consensus = Agreement(
            PollingStore(store, config.timeout, ranks=communicator.size),
            communicator.rank,
            communicator.size,
            f"tune/{name}",
            config.timeout,
            ended=communicator.awaited().among,
        )
        plans = PLANS if config.plan == "auto" else ()
        self.tuner = Tuner(
            incumbent,
            lambda sizes, arrivals: propose(communicator.cluster, incumbent, sizes, arrivals, plans),
            consensus,
            known=load(self._file, self._key) if self._file else None,
            budget=budget,
            trials=bool(config.tune),
            record=self._record,
            found=self._found,
        )
        self._applied = incumbent
        self._over = False

    def step_ended(self, step: EndedStep) -> None:
        """Takes in the step that has just ended and applies the setting of the next; every rank, after every step.

        In elastic training it is over where a rank does not come to a decision: those that go on tune nothing.
        """
        if self._over:
            return
        times = [bucket.times for bucket in step.buckets]
        arrived = [each.arrived for each in times if each.arrived is not None]
        now = self._clock.now()
        self._unread.append((self._ended, now, self._fusion.last_sizes, arrived))
        self._ended = now
        if len(self._unread) <= self._clock.lag:
            return
        before, ended, sizes, marks = self._unread.popleft()
        arrivals = tuple(self._clock.between(marks[0], each) for each in marks)
        try:
            setting = self.tuner.step_ended(StepSeen(self._clock.between(before, ended), sizes, arrivals))
        except ValueError as refused:  # on all ranks alike, which go on by the same setting
            if not self._communicator.config.elastic:
                raise
            self._over = True
            log.warning("the tuning of cuts ends, and what is in use stays: %s", refused)
            return
        if setting != self._applied:
            self._communicator.routes.choose(setting.plan, setting.chunks, "Chosen by the tuner.")
            self._communicator.connect(max(sizes))
            self._fusion.change(setting.fusion)
            self._applied = setting

    def _found(self, setting: TunerSetting, seconds: float) -> None:
        if self._file:
            with self._writing(self._file):
                save(self._file, self._key, setting, seconds)

    def _record(self, row: Sequence[object]) -> None:
        if self._file:
            rows = self._file.with_suffix(".csv")
            with self._writing(rows):
                new = not rows.exists()
                with rows.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([LOG_COLUMNS, row] if new else [row])

    @contextmanager
    def _writing(self, file: Path) -> Iterator[None]:
        """Brackets writing: what cannot be kept ends no training."""
        try:
            yield
        except OSError as error:
            self._file = None
            log.warning(
                "`tune` is %s, and rank 0 cannot write %s (%s): tuning goes on, and its result is not kept; name a "
                "file in a folder that is there",
                self._communicator.config.tune,
                file,
                error.strerror,
            )
