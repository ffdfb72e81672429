"""A look at the links between nodes before the first step, where nobody has said what they give: well under a second.

Nodes meet in pairs, all of them at once, as for `unit_rates`; here they swap as many bytes as a first short swap says
they can in `SWAP_SECONDS`. It uses the connections that training needs too, and tells everybody the result by an
all-reduce: the store hears nothing of it.

What it finds prices plans and advice from the first step on. And nodes with slower links own less of what is
exchanged, in plans whose bits do not depend on that: sums are then made in the order in which gloo's ring makes them
with equal shares, which is tried on the spot. Nothing else goes by it, because a clock must change no bit.
"""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.comms.autotune.probe import line_up, probe_phases
from gradwire.comms.autotune.unit_rates import pairings, relative_rates
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.plan import Plan
from gradwire.comms.transport.torch_group import GlooTransport, ring_runs

log = logging.getLogger("gradwire")

DRAIN_NBYTES = 80 << 10
"""From each node, before each timed swap and without a pause: what a token bucket has saved up (64 kB in `tbf` as
`gradwire emulate` sets it, and as guides recommend) is gone then, and what is timed goes at the link's rate."""

TRIAL_NBYTES = 64 << 10
"""Of the first timed swap, which says how large the others may be: 52 ms on 10 Mbit/s."""

SWAP_SECONDS, LEAST_SWAPPED_NBYTES, MOST_SWAPPED_NBYTES = 0.08, 32 << 10, 1 << 20
"""How long a timed swap may take on the slowest link, and its bytes from each node at least and at most. With a third
of that a link four times as fast had 7 ms: with a load of 8 on two cores, what a bucket saves up in a pause showed one
of three equal links a third faster than the others."""

BUDGET_SECONDS = 0.5
"""For all meetings after the first trial: on very slow links nodes meet fewer partners."""

MEETINGS = 3
"""Partners of each node: as for `unit_rates`, whoever meets a slow node meets another one too."""

SMALL_SWAPS = 5
"""Of one element: half of them are as fast as the link's latency allows."""

CHECKED_NUMEL = 1 << 10
"""Elements of the sum that shows in which order gloo's ring adds."""


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
        or config.transport == "mpi"
        or cluster.depth != 2
        or len(nodes) == 1
        or not cluster.levels[1].link.presumed
    ):
        return False
    began = time.perf_counter()
    meeting = _Meeting(communicator)
    rounds = pairings(len(nodes), MEETINGS)
    trials = meeting.meet(rounds[0], TRIAL_NBYTES)
    seconds, latency = (max(column) for column in zip(*(each[2:] for each in trials), strict=True))
    nbytes = round(min(max(TRIAL_NBYTES / seconds * SWAP_SECONDS, LEAST_SWAPPED_NBYTES), MOST_SWAPPED_NBYTES))
    expected = seconds * (DRAIN_NBYTES + nbytes) / TRIAL_NBYTES
    rounds = rounds[: max(1 + len(nodes) % 2, int(BUDGET_SECONDS / expected))]  # of an odd number one node pauses
    took = [(one, other, each) for pairs in rounds for one, other, each, _ in meeting.meet(pairs, nbytes)]
    levels = list(cluster.levels)
    link = replace(levels[1].link, alpha_seconds=latency, presumed=False)
    levels[1] = replace(levels[1], link=link)
    rates = node_rates(len(nodes), nbytes, took, every_partner=len(rounds) == len(pairings(len(nodes), MEETINGS)))
    if min(rates) < max(rates) and not meeting.sums_as_rings():
        log.warning("gloo adds in an order that is not known: nodes share equally, whatever their links give")
        rates = [min(rates)] * len(nodes)
    communicator.routes.learned(with_node_rates(replace(cluster, levels=tuple(levels)), rates).levels, at_start=True)
    log.info("the links were measured in %.2f s", time.perf_counter() - began)
    return True


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


class _Meeting:
    """Swaps between nodes.

    Args:
        communicator: Whose ranks meet, the first of each node: of two ranks that share a link one may send while the
            other still waits, and both would seem to have it alone.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._nodes = communicator.cluster.nodes
        self._own = communicator.cluster.node_rank(communicator.rank)
        place = self._nodes[self._own].index(communicator.rank)
        self._rail: GlooTransport | None = None
        line_up(communicator)
        if place == 0:
            rail = communicator.transport((0, 0), tuple(node[0] for node in self._nodes))
            assert isinstance(rail, GlooTransport)
            rail.connect_both_ways()  # also where this node pauses at first
            self._rail = rail

    def meet(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int, float, float]]:
        """All pairs swap `nbytes` at once.

        Args:
            pairs: Of nodes; each node in one at most.
            nbytes: From each node to its partner.

        Returns:
            Of each pair (one, other, seconds, seconds of a swap of one element), by its slowest rank; alike on all.
        """
        communicator = self._communicator
        own = next((pair for pair in pairs if self._own in pair), None)
        line_up(communicator)
        table = torch.zeros(communicator.size, 2)
        if own is not None and self._rail is not None:
            seen = swaps(self._rail, own[own[0] == self._own], nbytes, DRAIN_NBYTES)
            table[communicator.rank] = torch.tensor(seen)
        table = _told(communicator, table)
        found = []
        for one, other in pairs:
            ranks = [*self._nodes[one], *self._nodes[other]]
            seconds, latency = table[ranks].amax(0).tolist()
            found.append((one, other, seconds, latency))
        return found

    def sums_as_rings(self) -> bool:
        """Whether the transport's all_reduce adds in the order that `ring_runs` says; the same on all ranks."""
        right = 1.0
        if self._rail is not None:
            size = self._rail.size
            rows = [torch.randn(CHECKED_NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
            total = rows[self._rail.rank].clone()
            self._rail.all_reduce(total).wait()
            at = 0
            for numel, last in ring_runs(((0, CHECKED_NUMEL),), 0, CHECKED_NUMEL, size, 4):
                run = slice(at, at + numel)
                expected = rows[(last - 1) % size][run]
                for back in range(2, size + 1):
                    expected = rows[(last - back) % size][run] + expected
                right = min(right, float(torch.equal(total[run], expected)))
                at += numel
        found = _told(self._communicator, torch.tensor([1.0 - right]))
        return not found.any()


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
        rail.swap(other, received[:numel], sent[:numel]).wait()
        return time.perf_counter() - began

    saved, numel = -(-saved_nbytes // 4), max(nbytes // 4, 1)
    sent = torch.zeros(max(saved, numel))
    received = torch.empty_like(sent)
    swap(1)
    small = statistics.median([swap(1) for _ in range(SMALL_SWAPS)])
    swap(saved)
    return swap(numel), small


def _told(communicator: Communicator, flat: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, the same bits on all of them."""
    cluster = communicator.cluster
    wide = [number for number in range(cluster.depth) if cluster.widest(number) > 1]
    own = flat.contiguous().view(-1).clone()
    plan = Plan("probe", probe_phases(cluster, wide[-1]), 1, own.nbytes, 0.0, {}, "What was measured.")
    communicator.run(own, plan).wait()
    return own.view_as(flat)
