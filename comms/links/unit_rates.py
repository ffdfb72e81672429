"""What each node's link gives, measured node against node: at start-up, and again while training runs.

A collective over all nodes is as fast as its slowest link, so it shows one rate and not whose. Here nodes meet in
pairs, one pair beside the other, in a few rounds with other partners: a pair is as fast as the slower of the two, and a
node as fast as its best pair. Its cost does not grow with the number of nodes.
"""

import statistics
from collections.abc import Sequence

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.links.probe import line_up
from gradwire.comms.step.listeners import StepListener

SWAPPED_NBYTES, LEAST_SWAPPED_NBYTES, SWAP_SECONDS = 1 << 20, 512 << 10, 0.02
"""Most and least bytes from each node to its partner, over all its ranks, and seconds that the slowest link may take
between those bounds. The least is more than a shaper lets pass at once."""

MEETINGS, REPEATS = 3, 3
"""Partners of each node, and how often it meets each: the median counts."""

ALIKE = 0.8
"""A node that reaches this share of the fastest one's rate is taken to be as fast: measurements scatter by less."""

REMEASURE_STEPS = 500
"""Steps between two measurements while training runs: nine swaps, 0.2 s on 200 Mbit/s, in what takes minutes there."""


def pairings(count: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Who meets whom: in each round everybody has at most one partner, and never the same one twice.

    Args:
        count: Of nodes; of an odd number one has a pause in each round.
        rounds: How many, at most; there are no more than partners.

    Source: the circle method for round-robin tournaments (Lucas, Recreations mathematiques, vol. 2, 1883).
    """
    slots = list(range(count)) + [-1] * (count % 2)
    found = []
    for _ in range(min(rounds, len(slots) - 1)):
        pairs = zip(slots[: len(slots) // 2], reversed(slots[len(slots) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return found


def relative_rates(count: int, seconds: Sequence[tuple[int, int, float]]) -> tuple[float, ...]:
    """What each node reaches, as a share of the fastest; 1 for those that are as good as that.

    Args:
        count: Of nodes.
        seconds: Of each meeting: the two nodes, and how long the same number of bytes took.
    """
    best = [0.0] * count
    for one, other, took in seconds:
        for node in (one, other):
            best[node] = max(best[node], 1 / took)
    fastest = max(best)
    return tuple(1.0 if rate >= ALIKE * fastest or not rate else rate / fastest for rate in best)


def measure_units(communicator: Communicator, consensus: Agreement, *, again: bool = False) -> bool:
    """Measures every node's link, and has the communicator plan with what it finds; every rank, with nothing in flight.

    Nodes are given rates in proportion. The probe's rate is that of the slowest; later the fastest keeps its rate.
    Nothing is measured on CUDA, where payloads go by given rates alone (docs/develop/cuda.md), or where shares do
    not matter: of fewer than three nodes.

    Args:
        communicator: Whose ranks meet.
        consensus: All its ranks'.
        again: Whether nodes have been measured before.

    Returns:
        Whether plans have changed.
    """
    cluster = communicator.cluster
    nodes, count = cluster.nodes, len(cluster.nodes)
    if communicator.device.type != "cpu" or count < 3:
        return False
    level = cluster.levels[1]
    slowest = min(level.unit_rates, default=level.link.bytes_per_second)
    nbytes = round(min(max(slowest * SWAP_SECONDS, LEAST_SWAPPED_NBYTES), SWAPPED_NBYTES))
    rails, own = min(map(len, nodes)), cluster.node_rank(communicator.rank)
    place = nodes[own].index(communicator.rank)
    took: list[tuple[int, int, float]] = []
    for pairs in pairings(count, MEETINGS):
        pair = next((pair for pair in pairs if own in pair), None)
        times = []
        for _ in range(REPEATS):
            line_up(communicator)
            if pair is not None and place < rails:
                partner = nodes[pair[1] if own == pair[0] else pair[0]][place]
                times.append(communicator.sendrecv(partner, nbytes // rails))
        if pair is not None and times:
            took.append((*pair, statistics.median(times)))

    def slowest_rank(ranks: Sequence[object]) -> object:
        meetings: dict[tuple[int, int], float] = {}
        for each in ranks:
            for one, other, seconds in each if isinstance(each, list) else []:
                meetings[one, other] = max(meetings.get((one, other), 0.0), seconds)
        return relative_rates(count, [(*pair, seconds) for pair, seconds in meetings.items()])

    found = consensus.decide(took, slowest_rank)
    assert isinstance(found, list)
    fastest = max(level.unit_rates, default=level.link.bytes_per_second / (1.0 if again else min(found)))
    changed = with_node_rates(cluster, [fastest * rate for rate in found])
    if [level.unit_rates for level in changed.levels] == [level.unit_rates for level in cluster.levels]:
        return False
    communicator.rank_plans.measured(changed.levels)
    return True


class UnitRates(StepListener):
    """Measures every node's link when it is made, and again now and then; every rank makes one.

    Args:
        communicator: Whose ranks meet.
        consensus: All its ranks'.
    """

    def __init__(self, communicator: Communicator, consensus: Agreement) -> None:
        self._communicator = communicator
        self._consensus = consensus
        measure_units(communicator, consensus)

    def step_began(self, steps: int) -> None:
        """Measures again where it is time to: every rank, with nothing in flight."""
        if steps and steps % REMEASURE_STEPS == 0:
            measure_units(self._communicator, self._consensus, again=True)
