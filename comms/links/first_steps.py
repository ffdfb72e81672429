"""What the links give, seen from the first steps' own transfers: nothing is sent for it, and nothing else is done.

Where nobody has said or measured the links' rates, plans are made for assumed ones. Their predictions are worth little
(what `quick_probe` has seen at the start) or nothing until training itself has shown what a link carries. Rates from
here on price plans and advice; they choose nothing, because a plan that a clock has chosen would give other last bits
in every run.
"""

from collections.abc import Iterable
from dataclasses import replace

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.cost import CostModel
from gradwire.comms.plan.plan import ALL_GATHER, Plan
from gradwire.comms.step.listeners import StepListener
from gradwire.topology.cluster import Cluster

FIRST_WATCHED, STEPS_WATCHED = 1, 3
"""Not the first step: connections are made in it, and DDP has other buckets. One of three may be disturbed."""

LEAST_NBYTES = 4 << 20
"""Least bytes over the outermost link in all watched steps: below that messages' latency is most of what is seen."""


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds for which at least one of some spans was under way.

    Args:
        spans: (began, ended) of each.
    """
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def _link_seconds(cluster: Cluster, level: int, plan: Plan) -> float:
    """How long the slowest link of a level is busy with a plan, at the units' rates."""
    model = CostModel.of(cluster, plan.phases)
    costs = [model.phase(phase) for phase in plan.phases if phase.level == level]
    most = sum(float(cost.egress.nbytes[level].max()) for cost in costs)
    busy = sum(cost.seconds_per_byte * cost.byte_share for cost in costs)
    return plan.bytes_by_level[cluster.levels[level].name] * busy / most


class FirstSteps(StepListener):
    """Watches the first steps of a job whose links are unknown, and then prices its plans by what they have reached.

    Where nodes' links were seen to differ at the start, their rates keep their proportions.

    Every rank makes one and calls it at the same points. Only on CPUs, and not where the number of ranks may change.
    Until it is over no exponents are packed: how much shorter that makes payloads is not known beforehand, and the time
    of packing would count as the link's.

    Args:
        communicator: Whose transfers are watched.
        consensus: All its ranks'.
    """

    def __init__(self, communicator: Communicator, consensus: Agreement) -> None:
        self._communicator = communicator
        self._consensus = consensus
        cluster = communicator.cluster
        self._outermost = cluster.outermost
        self._before = 0.0
        self.is_over = (
            communicator.device.type != "cpu"
            or communicator.size == 1
            or not cluster.levels[self._outermost].link.presumed
        )
        """Whether there is nothing left to watch."""

    def step_began(self, steps: int) -> None:
        """Every rank, at the beginning of each step, with nothing in flight.

        Args:
            steps: That have ended.
        """
        if self.is_over:
            return
        executor = self._communicator.executor
        if steps == FIRST_WATCHED:
            executor.stats.ended = []
            self._before = self._gathering_seconds()
        elif steps == FIRST_WATCHED + STEPS_WATCHED:
            self.is_over = True
            self._conclude()
            executor.stats.ended = None

    def _conclude(self) -> None:
        communicator, cluster = self._communicator, self._communicator.cluster
        ended = communicator.executor.stats.ended or []
        name = cluster.levels[self._outermost].name
        sent = sum(each.plan.bytes_by_level[name] for each in ended)
        if sent < LEAST_NBYTES:  # the same on all ranks: they have run the same plans
            return
        own = [busy_seconds((each.began, each.ended) for each in ended), self._gathering_seconds() - self._before]

        def fastest(ranks: list[object]) -> object:
            # Whose gradients come last waits for nobody: what it sees is the transfer alone.
            return [min(column) for column in zip(*(each for each in ranks if isinstance(each, list)), strict=True)]

        seconds = self._consensus.decide(own, fastest)
        assert isinstance(seconds, list)
        priced = communicator.rank_plans.links.priced
        levels = list(priced.levels)
        outer = levels[self._outermost]
        if outer.unit_rates:
            slower = seconds[0] / sum(_link_seconds(priced, self._outermost, each.plan) for each in ended)
            levels[self._outermost] = outer.with_rates([rate / slower for rate in outer.unit_rates])
        else:
            link = replace(outer.link, bytes_per_second=sent / seconds[0], presumed=False)
            levels[self._outermost] = replace(outer, link=link)
        inside = levels[0].link
        plan = ended[0].plan
        gathers = [phase for phase in plan.phases if phase.op == ALL_GATHER and phase.level == 0]
        if self._outermost and inside.presumed and gathers and seconds[1] > 0:
            model = CostModel.of(cluster, plan.phases)
            for_each_byte = model.phase(gathers[0]).seconds_per_byte * inside.bytes_per_second
            rate = for_each_byte * sum(each.plan.nbytes for each in ended) / seconds[1]
            levels[0] = replace(
                levels[0], link=replace(inside, bytes_per_second=rate, presumed=False, on_processor=True)
            )
        communicator.rank_plans.learned(levels)

    def _gathering_seconds(self) -> float:
        """Seconds of all-gathers inside the node so far: shared memory, where the last to come waits for nobody."""
        name = self._communicator.cluster.levels[0].name
        rows = self._communicator.executor.stats.phase_seconds().items()
        return sum(seconds for (_, op, level), (seconds, _, _) in rows if op == ALL_GATHER and level == name)
