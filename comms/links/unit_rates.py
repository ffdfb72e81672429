"""Measures the rate of each node's link, at start-up and periodically during training.

A collective over all nodes is as fast as its slowest link, so it cannot show which node is slow. Here nodes exchange
bytes in pairs, all pairs at once, in a few rounds with changing partners. A pair is as fast as the slower of its two
links, and a node's link is as fast as its best pair. The cost does not grow with the number of nodes.
"""

import statistics
from collections.abc import Sequence

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.links.probe import line_up
from gradwire.comms.step.listeners import StepListener

EXCHANGED_NBYTES, LEAST_EXCHANGED_NBYTES, EXCHANGE_SECONDS = 1 << 20, 512 << 10, 0.02
"""Largest and smallest number of bytes from each node to its partner, over all its ranks, and the intended time on the
slowest link. The smallest is more than a traffic shaper lets pass at once."""

PARTNERS, REPEATS = 3, 3
"""Number of partners of each node, and number of exchanges with each partner, whose median counts."""

EQUAL_SHARE = 0.8
"""Share of the fastest rate from which a node counts as equally fast; measurements scatter by less."""

REMEASURE_STEPS = 500
"""Steps between two measurements. One takes nine exchanges, 0.2 s on 200 Mbit/s, where 500 steps take minutes."""


def pairings(count: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Pairs nodes for rounds of exchanges: a node has at most one partner in a round, and another one in each round.

    Args:
        count: Number of nodes. With an odd number one node has no partner in each round.
        rounds: Largest number of rounds. There are fewer if each node has been paired with all others before.

    Returns:
        For each round, a list of (node with the lower number, its partner).

    Source: the circle method for round-robin tournaments (Lucas, Recreations mathematiques, vol. 2, 1883).
    """
    slots = list(range(count)) + [-1] * (count % 2)
    pairs_of_rounds = []
    for _ in range(min(rounds, len(slots) - 1)):
        pairs = zip(slots[: len(slots) // 2], reversed(slots[len(slots) // 2 :]), strict=True)
        pairs_of_rounds.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return pairs_of_rounds


def relative_rates(count: int, seconds: Sequence[tuple[int, int, float]]) -> tuple[float, ...]:
    """Returns the rate of each node's link, by node, as a share of the fastest node's.

    A node's rate is that of its fastest exchange. Nodes from `EQUAL_SHARE` of the fastest rate on, and those that took
    part in no exchange, get 1.

    Args:
        count: Number of nodes.
        seconds: (one node, other node, seconds) of each exchange, all of the same number of bytes.
    """
    best = [0.0] * count
    for one, other, took in seconds:
        for node in (one, other):
            best[node] = max(best[node], 1 / took)
    fastest = max(best)
    return tuple(1.0 if rate >= EQUAL_SHARE * fastest or not rate else rate / fastest for rate in best)


def measure_units(communicator: Communicator, consensus: Agreement, *, again: bool = False) -> bool:
    """Measures every node's link, and makes the communicator plan with the rates.

    Every rank calls it, with nothing in flight. Rates are proportional to what nodes reach: at first the slowest node
    gets the rate that `probe` has measured, later the fastest node keeps its rate. Nothing is measured on CUDA, where
    only given rates count (docs/develop/cuda.md), nor for fewer than three nodes, where shares do not matter.

    Args:
        communicator: Communicator of the ranks.
        consensus: Object by which all its ranks agree on values.
        again: True if nodes have been measured before.

    Returns:
        True if rates have changed, and plans with them; the same on all ranks.
    """
    cluster = communicator.cluster
    nodes, count = cluster.nodes, len(cluster.nodes)
    if communicator.device.type != "cpu" or count < 3:
        return False
    # Decide how many bytes are exchanged, and by which ranks: as many of each node as the smallest node has.
    level = cluster.levels[1]
    slowest = min(level.unit_rates, default=level.link.bytes_per_second)
    nbytes = round(min(max(slowest * EXCHANGE_SECONDS, LEAST_EXCHANGED_NBYTES), EXCHANGED_NBYTES))
    rails, own = min(map(len, nodes)), cluster.node_rank(communicator.rank)
    place = nodes[own].index(communicator.rank)
    # Exchange with the partner of each round, and keep the median.
    took: list[tuple[int, int, float]] = []
    for pairs in pairings(count, PARTNERS):
        pair = next((pair for pair in pairs if own in pair), None)
        times = []
        for _ in range(REPEATS):
            line_up(communicator)
            if pair is not None and place < rails:
                partner = nodes[pair[1] if own == pair[0] else pair[0]][place]
                times.append(communicator.sendrecv(partner, nbytes // rails))
        if pair is not None and times:
            took.append((*pair, statistics.median(times)))

    # Rank 0 makes relative rates of all times; they become rates by the slowest or the fastest node's.
    def slowest_rank(ranks: Sequence[object]) -> object:
        slowest_of_pair: dict[tuple[int, int], float] = {}
        for each in ranks:
            for one, other, seconds in each if isinstance(each, list) else []:
                slowest_of_pair[one, other] = max(slowest_of_pair.get((one, other), 0.0), seconds)
        return relative_rates(count, [(*pair, seconds) for pair, seconds in slowest_of_pair.items()])

    found = consensus.decide(took, slowest_rank)
    assert isinstance(found, list)
    fastest = max(level.unit_rates, default=level.link.bytes_per_second / (1.0 if again else min(found)))
    changed = with_node_rates(cluster, [fastest * rate for rate in found])
    if [level.unit_rates for level in changed.levels] == [level.unit_rates for level in cluster.levels]:
        return False
    communicator.rank_plans.measured(changed.levels)
    return True


class UnitRates(StepListener):
    """Measures every node's link when it is made, and again every `REMEASURE_STEPS` steps; every rank makes one.

    Args:
        communicator: Communicator of the ranks.
        consensus: Object by which all its ranks agree on values.
    """

    def __init__(self, communicator: Communicator, consensus: Agreement) -> None:
        self._communicator = communicator
        self._consensus = consensus
        measure_units(communicator, consensus)

    def step_began(self, steps: int) -> None:
        """Measures again every `REMEASURE_STEPS` steps; every rank calls it when a step begins, with nothing in flight.

        Args:
            steps: Number of steps that have ended.
        """
        if steps and steps % REMEASURE_STEPS == 0:
            measure_units(self._communicator, self._consensus, again=True)
