"""Estimates link rates from the transfers of the first training steps; sends nothing itself.

If link rates are neither given nor measured, plans are made for assumed rates, and their predicted times mean little.
`FirstSteps` measures what the transfers of a few steps reach, and later predictions and advice use these rates. They do
not choose plans: a plan chosen by a clock would give other last bits in every run.
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
"""First step that is measured, and number of measured steps. In step 0 connections are made and DDP has other buckets;
one of three steps may be disturbed."""

LEAST_NBYTES = 4 << 20
"""Fewest bytes over the outermost link in all measured steps together: with fewer, most of the time is latency, and no
rate is taken from them."""


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the time that is covered by at least one span, in seconds; 0 without spans.

    Args:
        spans: (began, ended) of each span in seconds, in any order; they may overlap.
    """
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def _link_seconds(cluster: Cluster, level: int, plan: Plan) -> float:
    """Returns the predicted seconds for which a plan keeps the slowest link of a level busy.

    This is the number of bytes that the plan sends over the link times the seconds for each byte of the cost model,
    without latency.

    Args:
        cluster: Placement of the ranks, with link rates.
        level: Index of the level; at least one of the plan's phases sends over it.
        plan: Plan of one all-reduce.
    """
    model = CostModel.of(cluster, plan.phases)
    costs = [model.phase(phase) for phase in plan.phases if phase.level == level]
    most = sum(float(cost.egress.nbytes[level].max()) for cost in costs)
    busy = sum(cost.seconds_per_byte * cost.byte_share for cost in costs)
    return plan.bytes_by_level[cluster.levels[level].name] * busy / most


class FirstSteps(StepListener):
    """Measures the transfers of a job's first steps, and makes predictions use the rates that they reached.

    If nodes' links were found to differ at the start, their rates keep their proportions. Every rank makes one object
    and calls it at the same points. It is for CPUs, and for a fixed number of ranks.

    Args:
        communicator: Communicator whose transfers are measured.
        consensus: Object by which all its ranks agree on values.

    Attributes:
        is_over: True if there is nothing left to measure.
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

    def step_began(self, steps: int) -> None:
        """Starts or ends the measurement. Every rank calls it at the beginning of each step, with nothing in flight.

        At the end of the measurement, in step 4, it waits for the other ranks.

        Args:
            steps: Number of steps that have ended.
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
        """Computes link rates from the measured transfers, and makes predictions use them; every rank calls it.

        All ranks take the shortest time of any rank, which contains the least waiting, so rates are equal. If less than
        4 MiB was sent between nodes, it does nothing, on all ranks alike.
        """
        # Conclude nothing from too few bytes.
        communicator, cluster = self._communicator, self._communicator.cluster
        ended = communicator.executor.stats.ended or []
        name = cluster.levels[self._outermost].name
        sent = sum(each.plan.bytes_by_level[name] for each in ended)
        if sent < LEAST_NBYTES:  # the same on all ranks: they have run the same plans
            return
        # Agree on the seconds between nodes, and of all-gathers inside them.
        own = [busy_seconds((each.began, each.ended) for each in ended), self._gathering_seconds() - self._before]

        def fastest(ranks: list[object]) -> object:
            # The rank whose gradients are last does not wait for another one: it measures the transfer alone.
            return [min(column) for column in zip(*(each for each in ranks if isinstance(each, list)), strict=True)]

        seconds = self._consensus.decide(own, fastest)
        assert isinstance(seconds, list)
        # The link between nodes: scale the rates of all nodes, or set the one rate.
        priced = communicator.rank_plans.links.priced
        levels = list(priced.levels)
        outer = levels[self._outermost]
        if outer.unit_rates:
            slower = seconds[0] / sum(_link_seconds(priced, self._outermost, each.plan) for each in ended)
            levels[self._outermost] = outer.with_rates([rate / slower for rate in outer.unit_rates])
        else:
            link = replace(outer.link, bytes_per_second=sent / seconds[0], presumed=False)
            levels[self._outermost] = replace(outer, link=link)
        # The link inside a node: from its all-gathers, if its rate is not known.
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
        """Returns the seconds that all-gathers inside the node have taken so far, on this rank."""
        name = self._communicator.cluster.levels[0].name
        phases = self._communicator.executor.stats.phase_seconds().items()
        return sum(seconds for (_, op, level), (seconds, _, _) in phases if op == ALL_GATHER and level == name)
