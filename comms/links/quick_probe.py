"""A look at the links between nodes before the first step, where nobody has said what they give: mostly under a second.

Nodes meet in pairs, all of them at once, as for `unit_rates`; here they swap as many bytes as a first short swap says
they can in `SWAP_SECONDS`. It uses the connections that training needs too, and tells everybody the result by an
all-reduce: the store hears nothing of it.

What it finds prices plans and advice from the first step on. And nodes with slower links own less of what is
exchanged, in plans whose bits do not depend on that: sums are then made in the order in which gloo's ring makes them
with equal shares. Where nodes differ two small sums, of float32 and of bfloat16, show on the spot who begins each
element's sum, and when it is rounded; that larger arrays are cut into more segments rests on the releases of torch with
which that was compared. Nothing else goes by the look, because a clock must change no bit.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch

from gradwire.comms.bootstrap.compat import knows_gloo_sums
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.links.probe import line_up, probe_phases
from gradwire.comms.links.unit_rates import pairings, relative_rates
from gradwire.comms.plan.plan import Plan
from gradwire.comms.transport.groups import MeetsInPairs
from gradwire.comms.transport.sum_order import sums_as_rings
from gradwire.comms.transport.torch_group import GlooTransport
from gradwire.comms.transport.works import Done
from gradwire.compressors.base import Work

Result = TypeVar("Result")

log = logging.getLogger("gradwire")

DRAIN_NBYTES = 80 << 10
"""Bytes from each node, before each timed swap and without a pause: what a token bucket has saved up (64 kB in `tbf` as
`gradwire emulate` sets it, and as guides recommend) is gone then, and what is timed goes at the link's rate."""

TRIAL_NBYTES = 64 << 10
"""Bytes from each node in the first timed swap, which says how large the others may be: 52 ms on 10 Mbit/s."""

SWAP_SECONDS, LEAST_SWAPPED_NBYTES, MOST_SWAPPED_NBYTES = 0.08, 32 << 10, 1 << 20
"""How long a timed swap may take on the slowest link, and its bytes from each node at least and at most. With a third
of that a link four times as fast had 7 ms: with a load of 8 on two cores, what a bucket saves up in a pause showed one
of three equal links a third faster than the others."""

BUDGET_SECONDS = 0.5
"""Seconds for all meetings after the first trial: on very slow links nodes meet fewer partners. Where one meeting takes
longer (from 0.3 s for the trial, 1.8 Mbit/s) the trial is all there is."""

MEETINGS = 3
"""Partners of each node: as for `unit_rates`, whoever meets a slow node meets another one too."""

SMALL_SWAPS = 5
"""The small swaps of one element: half of them are as fast as the link's latency allows."""


def quick_probe(communicator: Communicator) -> bool:
    """Measures each node's link and one latency, and has the communicator price its plans with them.

    Every rank calls it before its first bucket. On CPUs over gloo, where ranks are on several nodes (of no racks and
    regions) and nothing is known of the links between those; else it does nothing.

    Args:
        communicator: Whose links are measured.

    Returns:
        Whether anything was measured; the same on all ranks.
    """
    cluster = communicator.cluster
    nodes, config = cluster.nodes, communicator.config
    if (
        communicator.device.type != "cpu"
        or config.transport_name == "mpi"
        or cluster.depth != 2
        or len(nodes) == 1
        or not cluster.levels[1].link.presumed
    ):
        return False
    began = time.perf_counter()
    meeting = Meeting(communicator)
    if not meeting.is_possible:
        log.warning("links are not looked at: the ranks between nodes are not connected by gloo")
        return False
    rounds = pairings(len(nodes), MEETINGS)
    trials = meeting.meet(rounds[0], TRIAL_NBYTES)
    seconds, latency = (max(column) for column in zip(*(each[2:] for each in trials), strict=True))
    nbytes = swapped_nbytes(seconds)
    affordable = int(BUDGET_SECONDS * TRIAL_NBYTES / (seconds * (DRAIN_NBYTES + nbytes)))
    odd = len(nodes) % 2  # one node pauses in each round
    met = [each[:3] for each in trials] if affordable == 0 else []
    nbytes = nbytes if affordable else TRIAL_NBYTES
    rounds = rounds[: max(1 + odd, affordable)] if affordable else rounds[1 : 1 + odd]
    took = met + [each[:3] for pairs in rounds for each in meeting.meet(pairs, nbytes)]
    levels = list(cluster.levels)
    link = replace(levels[1].link, alpha_seconds=latency, presumed=False)
    levels[1] = replace(levels[1], link=link)
    rates = node_rates(len(nodes), nbytes, took, every_partner=len(rounds) == len(pairings(len(nodes), MEETINGS)))
    if min(rates) < max(rates) and not (knows_gloo_sums() and meeting.sums_as_rings()):
        log.warning(
            "in which order gloo of torch %s adds is not known: nodes share equally, whatever their links give",
            torch.__version__,
        )
        rates = [min(rates)] * len(nodes)
    communicator.rank_plans.learned(
        with_node_rates(replace(cluster, levels=tuple(levels)), rates).levels, at_start=True
    )
    log.info("the links were measured in %.2f s", time.perf_counter() - began)
    return True


def swapped_nbytes(trial_seconds: float) -> int:
    """How much a timed swap carries from each node, by the seconds of one of `TRIAL_NBYTES`."""
    return round(min(max(TRIAL_NBYTES / trial_seconds * SWAP_SECONDS, LEAST_SWAPPED_NBYTES), MOST_SWAPPED_NBYTES))


def node_rates(count: int, nbytes: int, took: Sequence[tuple[int, int, float]], *, every_partner: bool) -> list[float]:
    """Bytes per second of each node's link.

    Args:
        count: Of nodes.
        nbytes: That each node has sent to its partner, and received.
        took: (one, other, seconds) of each pair that has met.
        every_partner: Whether nodes have met as many partners as it takes to see whose link a slow pair's is; else, and
            of two nodes, all are taken to be as slow as the slowest pair.
    """
    slowest = nbytes / max(seconds for _, _, seconds in took)
    if count < 3 or not every_partner:
        return [slowest] * count
    relative = relative_rates(count, took)
    best = [max(nbytes / seconds for one, other, seconds in took if node in (one, other)) for node in range(count)]
    usual = statistics.median(rate for rate, share in zip(best, relative, strict=True) if share == 1.0)
    return [usual * share for share in relative]


class Meeting:
    """Swaps between nodes.

    They go over the first lane of training's plans, which nothing else uses yet.

    Args:
        communicator: Whose ranks meet, the first of each node: of two ranks that share a link one may send while the
            other still waits, and both would seem to have it alone.

    Attributes:
        is_possible: Whether gloo connects all nodes; the same on all ranks. Else nothing can meet.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._nodes = communicator.cluster.nodes
        self._own = communicator.cluster.node_rank(communicator.rank)
        place = self._nodes[self._own].index(communicator.rank)
        self._members = tuple(node[0] for node in self._nodes)
        self._rail: GlooTransport | None = None
        line_up(communicator)
        if place == 0:
            self._run("connecting", self._connect)
        missing = _numbers(place == 0 and self._rail is None)
        self.is_possible = not _told(communicator, missing).any()

    def meet(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int, float, float]]:
        """All pairs swap `nbytes` at once.

        Args:
            pairs: Of nodes; each node in one at most.
            nbytes: From each node to its partner.

        Returns:
            Of each pair (one, other, seconds, seconds of a swap of one element), by its slowest rank; alike on all.
        """
        communicator = self._communicator
        partner = self.partner(pairs)
        line_up(communicator)
        table = torch.zeros(communicator.size, 2, dtype=torch.float32, device="cpu")
        if partner is not None and self._rail is not None:
            rail, other = self._rail, partner
            seen = self._run(
                f"swapping with node {other}", lambda: rail.listening(lambda: swaps(rail, other, nbytes, DRAIN_NBYTES))
            )
            table[communicator.rank] = _numbers(*seen)
        table = _told(communicator, table)
        found = []
        for one, other in pairs:
            ranks = [*self._nodes[one], *self._nodes[other]]
            seconds, latency = table[ranks].amax(0).tolist()
            found.append((one, other, seconds, latency))
        return found

    def sums_as_rings(self) -> bool:
        """Whether the transport's all_reduce adds in the order that `ring_runs` says; the same on all ranks."""
        wrong = False
        if (rail := self._rail) is not None:
            wrong = not self._run("a trial sum", lambda: sums_as_rings(rail))
        return not _told(self._communicator, _numbers(wrong)).any()

    def partner(self, pairs: Sequence[tuple[int, int]]) -> int | None:
        """The node that this one meets in some pairs; None where it pauses."""
        own = next((pair for pair in pairs if self._own in pair), None)
        return None if own is None else own[own[0] == self._own]

    def _connect(self) -> None:
        rail = self._communicator.transport((0, 0), self._members)
        if isinstance(rail, MeetsInPairs):
            rail.connect_both_ways()  # also where this node pauses at first
            self._rail = cast(GlooTransport, rail)

    def _run(self, what: str, call: Callable[[], Result]) -> Result:
        """What `call` returns. Where it fails all ranks hear of it, and of which rank it was."""
        returned: list[Result] = []

        def issue() -> Work:
            returned.append(call())
            return Done()

        self._communicator.run_collective(f"the look at the links ({what})", issue, self._members)
        return returned[0]


def swaps(rail: GlooTransport, other: int, nbytes: int, saved_nbytes: int) -> tuple[float, float]:
    """Seconds of a swap with another rank on a link that has nothing saved up, and of one of a single element.

    Args:
        rail: The ranks.
        other: Index of the other one.
        nbytes: From each to the other.
        saved_nbytes: That the link may let pass at once: they are swapped before.
    """

    def swap(numel: int) -> float:
        began = time.perf_counter()
        rail.sendrecv(other, received[:numel], sent[:numel]).wait()
        return time.perf_counter() - began

    saved, numel = -(-saved_nbytes // 4), max(nbytes // 4, 1)
    sent = torch.zeros(max(saved, numel), dtype=torch.float32, device="cpu")
    received = torch.empty_like(sent)
    swap(1)
    small = statistics.median([swap(1) for _ in range(SMALL_SWAPS)])
    swap(saved)
    return swap(numel), small


def _numbers(*values: float) -> torch.Tensor:
    """A tensor of float32, whatever a program has set as its default."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _told(communicator: Communicator, flat: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, the same bits on all of them."""
    cluster = communicator.cluster
    own = flat.contiguous().view(-1).clone()
    plan = Plan("probe", probe_phases(cluster, cluster.outermost), 1, own.nbytes, 0.0, {}, "What was measured.")
    communicator.run(own, plan).wait()
    return own.view_as(flat)
