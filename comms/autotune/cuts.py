"""Cuts of a step's gradients, computed from arrival times measured in the first steps, and kept in a file if asked.

The best cuts come from a dynamic program over where the last transfer begins. One channel takes transfers one after
another; a transfer of b bytes costs alpha + beta b and cannot begin before its last bucket has arrived.
F[j] = min over i of max(F[i], r_j) + alpha + beta (b_i+1 + ... + b_j).
Source: the recurrence of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, section IV), whose greedy solution this makes exact.

Every rank runs the same program in steps, so all change their cuts at the same step, and communicate only where a
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

SETTLED_STEPS = 2
"""Steps with equal buckets before arrivals are measured; DDP rebuilds its buckets after the first."""
PROFILED_STEPS = 5
"""Steps whose arrivals are measured; the median of each counts."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Arrival times of one step on one rank.

    Attributes:
        sizes: Bytes of its buckets.
        arrivals: When each arrived, in seconds from the first.
    """

    sizes: tuple[int, ...]
    arrivals: tuple[float, ...]


Program = Generator[FusionPlan, StepSeen, None]
Find = Callable[[tuple[int, ...], Sequence[float]], FusionPlan]
"""(sizes of the buckets, when they arrive) -> cuts."""


class CutFinder:
    """Finds the cuts on one rank: measures the first steps, agrees with the other ranks, computes.

    Args:
        begun: What training begins with.
        find: Called on rank 0 only.
        consensus: All ranks' of the group.
        keeps: Whether cuts are kept from run to run, on all ranks alike.
        known: Those of an earlier run, on rank 0; None: there are none.
        found: Called once with the cuts.

    Attributes:
        plan: What the next step is cut by.
        over: Whether the cuts are found.
    """

    def __init__(
        self,
        begun: FusionPlan,
        find: Find,
        consensus: Agreement,
        *,
        keeps: bool = False,
        known: FusionPlan | None = None,
        found: Callable[[FusionPlan], None] = lambda plan: None,
    ) -> None:
        self._begun, self._find, self._consensus = begun, find, consensus
        self._keeps, self._known, self._found = keeps, known, found
        self.over = False
        self._program = self._run()
        self.plan = next(self._program)

    def step_ended(self, seen: StepSeen) -> FusionPlan:
        """Takes in a step and returns the cuts of the next; every rank after every step."""
        self.plan = self._program.send(seen)
        return self.plan

    def _run(self) -> Program:
        sizes = yield from self._settle()
        plan = self._agreed(lambda: self._known) if self._keeps else None
        if plan is None:
            arrivals = yield from self._arrivals(len(sizes))
            plan = self._agreed(lambda: self._find(sizes, arrivals)) if sizes else self._begun
            assert plan is not None
            self._found(plan)
        self.over = True
        while True:
            yield plan

    def _settle(self) -> Generator[FusionPlan, StepSeen, tuple[int, ...]]:
        sizes: tuple[int, ...] = ()
        same = 0
        while same < SETTLED_STEPS:
            seen = yield self._begun
            same = same + 1 if seen.sizes == sizes and sizes else 0
            sizes = seen.sizes
        return sizes

    def _arrivals(self, count: int) -> Generator[FusionPlan, StepSeen, list[float]]:
        """When each bucket usually arrives on the slowest rank."""
        steps = []
        for _ in range(PROFILED_STEPS):
            steps.append((yield self._begun).arrivals)
        usual = [statistics.median(step[index] for step in steps if len(step) == count) for index in range(count)]
        decided = self._consensus.decide(usual, lambda ranks: [max(each) for each in zip(*_rows(ranks), strict=True)])
        return _rows([decided])[0]

    def _agreed(self, chosen: Callable[[], FusionPlan | None]) -> FusionPlan | None:
        """What rank 0 has chosen."""

        def choose(_: object) -> object:
            plan = chosen()
            return None if plan is None else record_of(plan)

        decided = self._consensus.decide(None, choose)
        return None if decided is None else plan_from(decided)


def _rows(values: Sequence[object]) -> list[list[float]]:
    """Lists of numbers as the consensus carries them."""
    rows = []
    for value in values:
        assert isinstance(value, list)
        rows.append([float(number) for number in value])
    return rows


class LearnsCuts(StepListener):
    """Listener that learns the cuts of one model and sets them as the fusion plan.

    Args:
        communicator: Of the ranks.
        fusion: Whose cuts are changed.
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
            found=self._keep,
        )
        self._over = False

    def step_ended(self, step: EndedStep) -> None:
        """Records the step that has just ended, and sets the cuts of the next; called on every rank after every step.

        In elastic training it is over where a rank does not come to a decision: those that go on change nothing.
        """
        if self._over:
            return
        times = [bucket.times for bucket in step.buckets]
        self._unread.append((self._fusion.last_sizes, [each.arrived for each in times if each.arrived is not None]))
        if len(self._unread) <= self._clock.lag:
            return
        sizes, marks = self._unread.popleft()
        arrivals = tuple(self._clock.between(marks[0], each) for each in marks)
        before = self.finder.plan
        try:
            plan = self.finder.step_ended(StepSeen(sizes, arrivals))
        except ValueError as refused:  # on all ranks alike, which go on by the same cuts
            if not self._communicator.config.elastic:
                raise
            self._over = True
            log.warning("gradwire: the search for cuts ends, and what is in use stays: %s", refused)
            return
        self._over = self.finder.over
        if plan != before:
            self._communicator.connect(max(sizes))
            self._fusion.change(plan)

    def _keep(self, plan: FusionPlan) -> None:
        """Writes the cuts to the file of `fusion`; a file that cannot be written ends no training."""
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
    """Returns the cuts with which the last all-reduce of a step ends first, for one plan.

    Args:
        cluster: Where the ranks are and what the links give.
        plan: Name of the plan that transfers go by.
        sizes: Bytes of the step's buckets, in order.
        arrivals: When they arrive, in seconds.
    """
    return FusionPlan(optimal_cuts(arrivals, sizes, *affine(cluster, plan, sum(sizes))), sizes)


def affine(cluster: Cluster, plan: str, nbytes: int) -> tuple[float, float]:
    """Returns seconds per all-reduce and per byte: a line through the predictions for a small and a large one.

    Args:
        cluster: Where.
        plan: Name of the plan.
        nbytes: Size of the large one; the small one is an eighth of it.
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
    """Returns the cuts with which the last all-reduce ends first, in O(n^2) for n buckets.

    Args:
        arrivals: When each bucket arrives, in seconds, ascending.
        sizes: Bytes of each bucket.
        alpha_seconds: Of a transfer.
        seconds_per_byte: Of a transfer.

    Raises:
        ValueError: There are more arrivals than sizes, or the reverse.
    """
    if len(arrivals) != len(sizes):
        raise ValueError(f"`arrivals` has {len(arrivals)} entries; wanted {len(sizes)}, as many as `sizes`")
    before = [0, *accumulate(sizes)]
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
    cuts, stop = [], len(sizes)
    while stop:
        cuts.append(stop)
        stop = begins[stop]
    return tuple(reversed(cuts))
