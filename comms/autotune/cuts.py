"""Finds the cuts of a step: the buckets after which one all-reduce ends and the next one begins.

They are computed from the arrival times of the buckets in the first steps, and kept in a file if the user asks for it.
The best cuts come from a dynamic program over the bucket at which the last all-reduce begins. All-reduces run one after
another; one of b bytes takes alpha + beta b seconds and cannot begin before its last bucket has arrived at r. With F[j]
as the earliest end of the first j buckets' all-reduces:
F[j] = min over i of max(F[i], r_j) + alpha + beta (b_i+1 + ... + b_j).
Source: the recurrence of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, section IV), whose greedy solution this makes exact.

Every rank runs the same program in steps, so all change their cuts at the same step, and communicate only when a
decision is due. Cuts change nothing that is computed.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from gradwire.comms.autotune.profile import fingerprint, load, plan_from, record_of, save
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.plan.planner import candidate_plans
from gradwire.comms.step.listeners import EndedStep, StepListener
from gradwire.comms.streams import Clock, HostClock, Mark
from gradwire.topology.cluster import Cluster

log = logging.getLogger("gradwire")

STEADY_STEPS = 2
"""Number of consecutive steps whose buckets have the same sizes as in the step before, after which arrivals are
measured. DDP rebuilds its buckets after the first step."""
PROFILED_STEPS = 5
"""Number of steps whose arrivals are measured; the median over them counts for each bucket."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Holds bucket sizes and arrival times of one step on one rank.

    Attributes:
        sizes: Bytes of each bucket of the step, in the order of arrival.
        arrivals: Seconds from the arrival of the first bucket to that of each bucket, in the same order.
    """

    sizes: tuple[int, ...]
    arrivals: tuple[float, ...]


Program = Generator[FusionPlan, StepSeen, None]
"""A coroutine that yields the fusion plan of the next step and is sent the observation of that step; it never ends."""
Find = Callable[[tuple[int, ...], Sequence[float]], FusionPlan]
"""(bytes of each bucket, seconds at which each arrives) -> fusion plan with the best cuts."""


class CutFinder:
    """Finds the cuts on one rank: waits for steady buckets, measures arrivals, and takes the cuts of rank 0.

    Every rank makes one and calls it after every step, so that all change their cuts at the same step.

    Args:
        begun: Fusion plan that is used until the cuts are found.
        find: Computes the cuts from the latest arrival of each bucket over the ranks; called on rank 0 only.
        consensus: Object by which all ranks agree on values.
        keeps: True if cuts are kept from run to run; equal on all ranks. All ranks then first take `known` of rank 0.
        known: Fusion plan that an earlier run has kept; None if there is none, so that cuts are measured. Read on rank
            0 only, and only with `keeps`.
        on_computed: Called once on every rank with the fusion plan that was computed from measurements; not called if
            `known` is used.

    Attributes:
        plan: Fusion plan of the next step.
        over: True once `plan` is final.
    """

    def __init__(
        self,
        begun: FusionPlan,
        find: Find,
        consensus: Agreement,
        *,
        keeps: bool = False,
        known: FusionPlan | None = None,
        on_computed: Callable[[FusionPlan], None] = lambda plan: None,
    ) -> None:
        self._begun, self._find, self._consensus = begun, find, consensus
        self._keeps, self._known, self._on_computed = keeps, known, on_computed
        self.over = False
        self._program = self._run()
        self.plan = next(self._program)

    def step_ended(self, seen: StepSeen) -> FusionPlan:
        """Records a step, and returns the fusion plan of the next one; every rank calls it after each step.

        It waits for the other ranks in the steps in which they decide: at most three times in all.

        Args:
            seen: Bucket sizes and arrivals of the step that has ended, on this rank.

        Raises:
            ValueError: The ranks could not agree on a plan; raised on all of them.
        """
        self.plan = self._program.send(seen)
        return self.plan

    def _run(self) -> Program:
        """Makes the coroutine of the search, see `Program`; once cuts are found, it yields the same plan for ever."""
        sizes = yield from self._steady_sizes()
        plan = self._agreed(lambda: self._known) if self._keeps else None
        if plan is None:
            arrivals = yield from self._arrivals(len(sizes))
            plan = self._agreed(lambda: self._find(sizes, arrivals)) if sizes else self._begun
            assert plan is not None
            self._on_computed(plan)
        self.over = True
        while True:
            yield plan

    def _steady_sizes(self) -> Generator[FusionPlan, StepSeen, tuple[int, ...]]:
        """Makes a coroutine that ends when the buckets' sizes have not changed for two steps (`STEADY_STEPS`).

        It returns the sizes, in bytes.
        """
        sizes: tuple[int, ...] = ()
        same = 0
        while same < STEADY_STEPS:
            seen = yield self._begun
            same = same + 1 if seen.sizes == sizes and sizes else 0
            sizes = seen.sizes
        return sizes

    def _arrivals(self, count: int) -> Generator[FusionPlan, StepSeen, list[float]]:
        """Makes a coroutine that measures five steps (`PROFILED_STEPS`), and returns the arrival time of each bucket.

        It is the median over the steps, in seconds from the first bucket on, on the rank where the bucket is last.

        Args:
            count: Number of buckets of a step. Steps with another number do not count as measured.
        """
        steps: list[Sequence[float]] = []
        while len(steps) < PROFILED_STEPS:
            if len(arrivals := (yield self._begun).arrivals) == count:
                steps.append(arrivals)
        usual = [statistics.median(step[index] for step in steps) for index in range(count)]
        decided = self._consensus.decide(usual, lambda ranks: [max(each) for each in zip(*_floats(ranks), strict=True)])
        return _floats([decided])[0]

    def _agreed(self, chosen: Callable[[], FusionPlan | None]) -> FusionPlan | None:
        """Returns rank 0's fusion plan on all ranks, or None if rank 0 has none; all ranks call it, and wait.

        Args:
            chosen: Function that returns the plan or None; called on rank 0 only.
        """

        def choose(_: object) -> object:
            plan = chosen()
            return None if plan is None else record_of(plan)

        decided = self._consensus.decide(None, choose)
        return None if decided is None else plan_from(decided)


def _floats(values: Sequence[object]) -> list[list[float]]:
    """Converts JSON values that ranks have exchanged to lists of floats.

    Args:
        values: Parsed JSON: lists of numbers, for example one from each rank.
    """
    lists = []
    for value in values:
        assert isinstance(value, list)
        lists.append([float(number) for number in value])
    return lists


class LearnsCuts(StepListener):
    """Finds, from a model's first steps, the cuts (the buckets after which an all-reduce ends), and sets them.

    Args:
        communicator: Communicator of the ranks that train the model.
        fusion: Fusion of the model's buckets; its plan is changed.
        store: Store that all ranks share; a client of its own is made from it.
        name: Name of the model in the store: unique among its models, equal on all ranks.
        model: Digest of the model's parameters; a file of cuts is used only for the model that it was made for.
        clock: Clock that the buckets' arrivals are read from; None takes the host's. With a device's clock each step is
            evaluated one step later.
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
        self._unread: deque[tuple[tuple[int, ...], Sequence[Mark]]] = deque()
        self._file = Path(config.cuts_file) if config.cuts_file and communicator.rank == 0 else None
        self._key: dict[str, object] = {
            "model": model,
            "world": communicator.size,
            "topology": fingerprint(cluster.locations),
            "device": communicator.device.type,
            "torch": torch.__version__,
        }
        consensus = Agreement(
            PollingStore(store, config.timeout, ranks=communicator.size),
            communicator.rank,
            communicator.size,
            f"tune/{name}",
            config.timeout,
            find_exited=communicator.peer_wait().exited_among,
        )
        chooser = communicator.rank_plans.chooser
        self.finder = CutFinder(
            fusion.plan,
            lambda sizes, arrivals: best_cuts(communicator.cluster, chooser.plan_name, sizes, arrivals),
            consensus,
            keeps=config.cuts_file is not None,
            known=load(self._file, self._key) if self._file else None,
            on_computed=self._keep,
        )
        self._over = False

    def step_ended(self, step: EndedStep) -> None:
        """Records the step that has just ended, and sets the cuts of the next; called on every rank after every step.

        If the ranks cannot agree in elastic training, the search ends and the present cuts stay.

        Args:
            step: The step, with the arrival time of each bucket.

        Raises:
            ValueError: The ranks could not agree, in training that is not elastic.
            CollectiveError: The ranks could not connect for a plan of the new cuts, in training that is not elastic.
        """
        if self._over:
            return
        # On a device, marks of time can be read only after a later step.
        times = [bucket.times for bucket in step.buckets]
        self._unread.append((self._fusion.last_sizes, [each.arrived for each in times if each.arrived is not None]))
        if len(self._unread) <= self._clock.lag:
            return
        sizes, marks = self._unread.popleft()
        arrivals = tuple(self._clock.between(marks[0], each) for each in marks)
        before = self.finder.plan
        try:
            plan = self.finder.step_ended(StepSeen(sizes, arrivals))
        except ValueError as refused:
            # Raised on all ranks, so all keep the same cuts.
            if not self._communicator.config.elastic:
                raise
            self._over = True
            log.warning("gradwire: the search for cuts ends, and the present cuts stay: %s", refused)
            return
        self._over = self.finder.over
        if plan != before:
            # First, so that all ranks have the decision even if one of them fails now, and some cannot connect.
            self._fusion.change(plan)
            try:
                self._communicator.connect(max(sizes))
            except (RuntimeError, OSError) as error:
                if not self._communicator.config.elastic:
                    raise
                log.debug("a generation has ended while its ranks connected for new cuts: %s", error)

    def _keep(self, plan: FusionPlan) -> None:
        """Writes the cuts to the file that the option `fusion` names, on rank 0; a file error is logged, not raised."""
        if self._file is None:
            return
        try:
            save(self._file, self._key, plan)
        except OSError as error:
            log.warning(
                "gradwire: `fusion` is %s, and rank 0 cannot write it (%s): the cuts are used, and not kept; name a "
                "file in a folder that is there",
                self._file,
                error.strerror,
            )


def best_cuts(cluster: Cluster, plan: str, sizes: tuple[int, ...], arrivals: Sequence[float]) -> FusionPlan:
    """Returns a fusion plan with the cuts by which the last all-reduce of a step is predicted to end earliest.

    Args:
        cluster: Placement of the ranks, with the rates of their links.
        plan: Name of the all-reduce plan that the transfers use.
        sizes: Bytes of the step's buckets, in the order of arrival.
        arrivals: Seconds at which each bucket arrives, ascending; any zero point.
    """
    return FusionPlan(optimal_cuts(arrivals, sizes, *affine(cluster, plan, sum(sizes))), sizes)


def affine(cluster: Cluster, plan: str, nbytes: int) -> tuple[float, float]:
    """Returns the line through a plan's predicted times for `nbytes` and an eighth of them: (seconds, seconds a byte).

    Each time is that with the best number of chunks.

    Args:
        cluster: Placement of the ranks, with the rates of their links.
        plan: Name of the plan.
        nbytes: Bytes of the larger all-reduce; fewer than 8 count as 8.

    Returns:
        (seconds of an all-reduce of no bytes, 0 if the line is below; seconds that each byte adds).
    """
    large = max(nbytes, 8)
    small = large // 8
    slow, fast = (
        min(candidate.seconds for candidate in candidate_plans(cluster, size, plan)) for size in (large, small)
    )
    beta = (slow - fast) / (large - small)
    return max(fast - beta * small, 0.0), beta


def optimal_cuts(
    arrivals: Sequence[float], sizes: Sequence[int], alpha_seconds: float, seconds_per_byte: float
) -> tuple[int, ...]:
    """Returns the cuts with which the last all-reduce of a step ends earliest, in O(n^2) time for n buckets.

    An all-reduce begins when its last bucket has arrived and the all-reduce before has ended.

    Args:
        arrivals: Seconds at which each bucket arrives, ascending; any zero point.
        sizes: Bytes of each bucket.
        alpha_seconds: Seconds that an all-reduce takes whatever its size.
        seconds_per_byte: Seconds that each byte adds to an all-reduce.

    Returns:
        Numbers of buckets, counted from the first of the step, after which an all-reduce ends; ascending, last n.
        `(2, 5)` has buckets 0 and 1 in one all-reduce, 2 to 4 in the next. Empty for no buckets.

    Raises:
        ValueError: There are more arrivals than sizes, or the reverse.
    """
    if len(arrivals) != len(sizes):
        raise ValueError(f"`arrivals` has {len(arrivals)} entries; wanted {len(sizes)}, as many as `sizes`")
    before = [0, *accumulate(sizes)]
    # finish[j]: earliest end of all-reduces of the first j buckets; begins[j]: where the last of these begins.
    finish = [0.0]
    begins = [0]
    for stop in range(1, len(sizes) + 1):
        best = min(
            range(stop),
            key=lambda start: (
                max(finish[start], arrivals[stop - 1])
                + alpha_seconds
                + seconds_per_byte * (before[stop] - before[start])
            ),
        )
        begins.append(best)
        finish.append(
            max(finish[best], arrivals[stop - 1]) + alpha_seconds + seconds_per_byte * (before[stop] - before[best])
        )
    # Follow the best beginnings back from the last bucket.
    cuts, stop = [], len(sizes)
    while stop:
        cuts.append(stop)
        stop = begins[stop]
    return tuple(reversed(cuts))
