"""Measures the links between CPU nodes before the first step, mostly in less than a second.

`quick_probe` runs if link rates are not known. All nodes exchange bytes in pairs at once, as in `unit_rates`. A first
short exchange shows how many bytes fit into `EXCHANGE_SECONDS`. The probe uses connections that training needs too, and
shares its result by an all-reduce, without the store.

The rates are used for predictions and advice from the first step on. In addition, nodes with slower links own less of
each exchange, in plans whose bits do not depend on it: sums are then made in the order of gloo's ring with equal
shares. If nodes differ, two small trial sums (float32 and bfloat16) check on the spot in which order gloo adds and when
it rounds. For larger tensors, which gloo cuts into more segments, the order was compared for certain releases of torch
(`knows_gloo_sums`). The rates decide nothing else, because a clock must not change the bits of a sum.
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
"""Bytes that each node sends directly before each timed exchange. They use up what a traffic shaper lets pass at once
(64 kB in `tbf` as `gradwire emulate` sets it, and as guides recommend), so that the timed bytes pass at the link's
rate."""

TRIAL_NBYTES = 64 << 10
"""Bytes that each node sends in the first timed exchange, which decides the size of the others: 52 ms on 10 Mbit/s."""

EXCHANGE_SECONDS, LEAST_EXCHANGED_NBYTES, MOST_EXCHANGED_NBYTES = 0.08, 32 << 10, 1 << 20
"""Intended time of a timed exchange on the slowest link, and its smallest and largest number of bytes from each node.
With a third of this time, a link four times as fast took 7 ms, and the tokens that a shaper saves in a pause made one
of three equal links seem a third faster (at a load of 8 on two cores)."""

BUDGET_SECONDS = 0.5
"""Time for all exchanges after the first trial; on very slow links each node has fewer partners. If a single exchange
would take longer (a trial of 0.3 s or more, 1.8 Mbit/s), the trial is the only measurement."""

PARTNERS = 3
"""Most partners of each node: a node that is paired with a slow one is then also paired with another one."""

SMALL_EXCHANGES = 5
"""Number of exchanges of one element for the latency; their median counts."""


def quick_probe(communicator: Communicator) -> bool:
    """Measures each node's link and one latency, and makes the communicator predict its plans with them.

    Every rank calls it before its first bucket, and waits for the others. It does nothing unless the ranks are on CPUs,
    connected by gloo, on several nodes without racks and regions, and the rates of the links between them are unknown.

    Args:
        communicator: Communicator whose links are measured.

    Returns:
        True if the links were measured; the same on all ranks.
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
    # Connect the first rank of each node.
    began = time.perf_counter()
    exchanges = PairedExchanges(communicator)
    if not exchanges.is_possible:
        log.warning("links are not measured: the ranks between nodes are not connected by gloo")
        return False
    # A short exchange decides how many bytes the others have, and how many of them there is time for.
    rounds = pairings(len(nodes), PARTNERS)
    trials = exchanges.run(rounds[0], TRIAL_NBYTES)
    seconds, latency = (max(column) for column in zip(*(each[2:] for each in trials), strict=True))
    nbytes = exchanged_nbytes(seconds)
    affordable = int(BUDGET_SECONDS * TRIAL_NBYTES / (seconds * (DRAIN_NBYTES + nbytes)))
    odd = len(nodes) % 2  # one node pauses in each round
    trial = [each[:3] for each in trials] if affordable == 0 else []
    nbytes = nbytes if affordable else TRIAL_NBYTES
    rounds = rounds[: max(1 + odd, affordable)] if affordable else rounds[1 : 1 + odd]
    took = trial + [each[:3] for pairs in rounds for each in exchanges.run(pairs, nbytes)]
    # Make rates of the times; nodes get different shares only if gloo's order of sums is known.
    levels = list(cluster.levels)
    link = replace(levels[1].link, alpha_seconds=latency, presumed=False)
    levels[1] = replace(levels[1], link=link)
    rates = node_rates(len(nodes), nbytes, took, every_partner=len(rounds) == len(pairings(len(nodes), PARTNERS)))
    if min(rates) < max(rates) and not (knows_gloo_sums() and exchanges.sums_as_rings()):
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


def exchanged_nbytes(trial_seconds: float) -> int:
    """Returns how many bytes each node shall send in a timed exchange, so that it takes about `EXCHANGE_SECONDS`.

    Args:
        trial_seconds: Seconds that an exchange of `TRIAL_NBYTES` has taken on the slowest link.

    Returns:
        Bytes, from `LEAST_EXCHANGED_NBYTES` to `MOST_EXCHANGED_NBYTES`.
    """
    nbytes = TRIAL_NBYTES / trial_seconds * EXCHANGE_SECONDS
    return round(min(max(nbytes, LEAST_EXCHANGED_NBYTES), MOST_EXCHANGED_NBYTES))


def node_rates(count: int, nbytes: int, took: Sequence[tuple[int, int, float]], *, every_partner: bool) -> list[float]:
    """Returns the rate of each node's link in bytes per second, by node.

    Nodes are compared by their fastest exchanges, so that a slow partner does not count. All that are nearly as fast as
    the fastest get the median of their rates; a slower node gets the share of it that it has of the fastest rate.

    Args:
        count: Number of nodes.
        nbytes: Bytes that each node sent to its partner, and received, in each exchange.
        took: (one node, other node, seconds) of each exchange.
        every_partner: True if each node had enough partners to tell whose link is slow. Otherwise, and for two nodes,
            all links get the rate of the slowest pair.
    """
    slowest = nbytes / max(seconds for _, _, seconds in took)
    if count < 3 or not every_partner:
        return [slowest] * count
    relative = relative_rates(count, took)
    best = [max(nbytes / seconds for one, other, seconds in took if node in (one, other)) for node in range(count)]
    usual = statistics.median(rate for rate, share in zip(best, relative, strict=True) if share == 1.0)
    return [usual * share for share in relative]


class PairedExchanges:
    """Times exchanges between pairs of nodes, over the first lane of training's plans, which is idle before training.

    Args:
        communicator: Communicator of the ranks. The first rank of each node takes part: if two ranks shared a link, one
            might send while the other still waits, and both would measure the whole link.

    Attributes:
        is_possible: True if gloo connects all nodes; the same on all ranks.
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
            self._call("connecting", self._connect)
        missing = _numbers(place == 0 and self._rail is None)
        self.is_possible = not _summed(communicator, missing).any()

    def run(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int, float, float]]:
        """Exchanges `nbytes` between the nodes of each pair, in all pairs at once; every rank calls it.

        Args:
            pairs: Pairs of nodes; each node is in one at most.
            nbytes: Bytes from each node to its partner.

        Returns:
            (one node, other node, seconds, seconds of an exchange of one element) of each pair, as its slowest rank
            measured them; the same on all ranks.
        """
        communicator = self._communicator
        partner = self.partner(pairs)
        line_up(communicator)
        table = torch.zeros(communicator.size, 2, dtype=torch.float32, device="cpu")
        if partner is not None and self._rail is not None:
            rail, other = self._rail, partner
            seen = self._call(
                f"exchanging with node {other}",
                lambda: rail.listening(lambda: timed(rail, other, nbytes, DRAIN_NBYTES)),
            )
            table[communicator.rank] = _numbers(*seen)
        table = _summed(communicator, table)
        found = []
        for one, other in pairs:
            ranks = [*self._nodes[one], *self._nodes[other]]
            seconds, latency = table[ranks].amax(0).tolist()
            found.append((one, other, seconds, latency))
        return found

    def sums_as_rings(self) -> bool:
        """Returns whether gloo's all_reduce adds in the order that `sum_order.ring_runs` describes.

        All ranks call it, wait for each other's trial sums, and get the same result.
        """
        wrong = False
        if (rail := self._rail) is not None:
            wrong = not self._call("a trial sum", lambda: sums_as_rings(rail))
        return not _summed(self._communicator, _numbers(wrong)).any()

    def partner(self, pairs: Sequence[tuple[int, int]]) -> int | None:
        """Returns the node that this rank's node is paired with; None if it is in no pair.

        Args:
            pairs: Pairs of nodes.
        """
        own = next((pair for pair in pairs if self._own in pair), None)
        return None if own is None else own[own[0] == self._own]

    def _connect(self) -> None:
        """Connects the first ranks of all nodes, and sets `_rail` to their transport if it is gloo's.

        Others cannot exchange between two ranks: `_rail` then stays None, and `is_possible` becomes False.
        """
        rail = self._communicator.transport((0, 0), self._members)
        if isinstance(rail, MeetsInPairs):
            rail.connect_both_ways()  # also if this node has no partner at first
            self._rail = cast(GlooTransport, rail)

    def _call(self, name: str, call: Callable[[], Result]) -> Result:
        """Calls a function and returns its result. If it raises, the communicator is aborted on all ranks.

        Args:
            name: Name of the operation, for the error's text.
            call: Communicates with the first ranks of other nodes, and returns when it is done.

        Raises:
            CollectiveError: `call` has raised an error, or another rank has aborted.
        """
        returned: list[Result] = []

        def issue() -> Work:
            returned.append(call())
            return Done()

        self._communicator.run_collective(f"the measurement of the links ({name})", issue, self._members)
        return returned[0]


def timed(rail: GlooTransport, other: int, nbytes: int, saved_nbytes: int) -> tuple[float, float]:
    """Times exchanges with another rank: returns (seconds for `nbytes`, median seconds for a single element).

    Args:
        rail: Transport of the ranks.
        other: Index of the other rank among the transport's; it makes the same call.
        nbytes: Bytes from each rank to the other.
        saved_nbytes: Bytes that a traffic shaper may let pass at once; they are exchanged before the timed bytes.
    """

    def exchange(numel: int) -> float:
        began = time.perf_counter()
        rail.sendrecv(other, received[:numel], sent[:numel]).wait()
        return time.perf_counter() - began

    saved, numel = -(-saved_nbytes // 4), max(nbytes // 4, 1)
    sent = torch.zeros(max(saved, numel), dtype=torch.float32, device="cpu")
    received = torch.empty_like(sent)
    exchange(1)
    small = statistics.median([exchange(1) for _ in range(SMALL_EXCHANGES)])
    exchange(saved)
    return exchange(numel), small


def _numbers(*values: float) -> torch.Tensor:
    """Returns a CPU tensor of float32, whatever default dtype and device the program has set."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _summed(communicator: Communicator, flat: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor over all ranks, with the same bits on all of them; every rank calls it.

    Args:
        communicator: Communicator of the ranks.
        flat: CPU tensor of any shape, not changed.
    """
    cluster = communicator.cluster
    own = flat.contiguous().view(-1).clone()
    plan = Plan("probe", probe_phases(cluster, cluster.outermost), 1, own.nbytes, 0.0, {}, "What was measured.")
    communicator.run(own, plan).wait()
    return own.view_as(flat)
