"""Alpha and beta of every level, measured at start-up on the groups that training will use.

Each level gets a small and a large all-reduce; the model's own formula, read backwards, turns the two times into a
latency and a bandwidth. The outer levels run below a reduce_scatter, as in a hierarchical plan, so that all cards and
flows of a node are in use; what the inner levels take is subtracted. All ranks measure at once, so the threads that pass
a collective on, and the cores that the ranks of a machine share, are in the latency.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.comms.communicator import Communicator
from gradwire.comms.consensus import Consensus
from gradwire.comms.cost import CostModel
from gradwire.comms.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase, Plan
from gradwire.topology.cluster import Cluster, Level, Link, Unit

SMALL_NBYTES = 16 << 10
"""Small enough to be latency alone, also where a traffic shaper lets the first 64 kB pass unshaped."""

LARGE_NBYTES = 4 << 20
"""Large enough that latency is a small part on 10 Gbit/s, small enough to take a third of a second on 200 Mbit/s."""

ROUNDS = {SMALL_NBYTES: 15, LARGE_NBYTES: 3}
"""What is short is disturbed more easily."""

BARRIER_NUMEL = 64
"""For each rank: so that every rank has a part in it, and none can leave before all have come."""

_known: dict[tuple[tuple[Unit, ...], str], tuple[Level, ...]] = {}


def probe(communicator: Communicator, consensus: Consensus) -> tuple[Level, ...]:
    """Measures all levels and has the communicator plan with them; every rank, before anything else is in flight.

    Results are kept for the same placement and device in this process.

    Args:
        communicator: Whose groups are measured.
        consensus: All its ranks'.
    """
    place = (communicator.cluster.locations, communicator.device.type)
    known = consensus.decide(place in _known, all)
    if not known:
        levels = list(communicator.cluster.levels)
        for number in range(communicator.cluster.depth):
            if communicator.cluster.widest(number) > 1:
                cluster = replace(communicator.cluster, levels=tuple(levels))
                times = [_measure(communicator, consensus, probe_phases(cluster, number), nbytes)
                         for nbytes in (SMALL_NBYTES, LARGE_NBYTES)]
                levels[number] = replace(levels[number], link=fitted(cluster, number, times[0], times[1]))
        _known[place] = tuple(_with_exchange(communicator, consensus, levels))
    communicator.measured(_known[place])
    return _known[place]


def _with_exchange(communicator: Communicator, consensus: Consensus, levels: list[Level]) -> list[Level]:
    """The levels, with how well the outermost, where payloads are exchanged, does that."""
    number = max((each for each in range(len(levels)) if communicator.cluster.widest(each) > 1), default=0)
    if number == 0:
        return levels
    cluster = replace(communicator.cluster, levels=tuple(levels))
    times = [_measure(communicator, consensus, probe_phases(cluster, number, exchange=True), nbytes)
             for nbytes in (SMALL_NBYTES, LARGE_NBYTES)]
    found, link = fitted(cluster, number, *times), levels[number].link
    link = replace(link, exchange_share=found.bytes_per_second / link.bytes_per_second,
                   exchange_alpha_seconds=found.alpha_seconds)
    return [*levels[:number], replace(levels[number], link=link), *levels[number + 1:]]


def probe_phases(cluster: Cluster, level: int, *, exchange: bool = False) -> tuple[Phase, ...]:
    """An all_reduce at one level, below the reduce_scatters and above the all_gathers of those inside.

    Args:
        cluster: Where.
        level: Which.
        exchange: Take it apart into a reduce_scatter and an all_gather, which move what a compressor's exchange moves.
    """
    inner = [number for number in range(level) if cluster.widest(number) > 1]
    parts = {number: cluster.widest(number) for number in inner}
    down = [Phase(REDUCE_SCATTER, number, parts[number]) for number in inner]
    up = [Phase(ALL_GATHER, number, parts[number]) for number in reversed(inner)]
    if not exchange:
        return (*down, Phase(ALL_REDUCE, level), *up)
    count = cluster.widest(level)
    return (*down, Phase(REDUCE_SCATTER, level, count), Phase(ALL_GATHER, level, count), *up)


def fitted(cluster: Cluster, level: int, small_seconds: float, large_seconds: float) -> Link:
    """The link of one level that explains two measured times, given the links of the levels inside.

    Args:
        cluster: With the links of the inner levels as measured.
        level: Which.
        small_seconds: Of `probe_phases` with SMALL_NBYTES.
        large_seconds: With LARGE_NBYTES.
    """
    old = cluster.levels[level].link
    phases = probe_phases(cluster, level)
    model = CostModel(cluster, {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER})
    costs = {phase: model.phase(phase) for phase in phases}
    small, large = (max(seconds - sum(cost.seconds(nbytes) for phase, cost in costs.items() if phase.level != level), 1e-9)
                    for seconds, nbytes in ((small_seconds, SMALL_NBYTES), (large_seconds, LARGE_NBYTES)))
    own = next(cost for phase, cost in costs.items() if phase.level == level)
    sent = own.seconds_per_byte * old.bytes_per_second  # bytes over the slowest link for each byte of bucket
    per_byte = max((large - small) / (LARGE_NBYTES - SMALL_NBYTES), 1e-13)
    messages = own.alpha_seconds / old.alpha_seconds if old.alpha_seconds else 1.0
    return replace(old, alpha_seconds=max(small - per_byte * SMALL_NBYTES, 0.0) / max(messages, 1.0),
                   bytes_per_second=sent / per_byte)


def _measure(communicator: Communicator, consensus: Consensus, phases: tuple[Phase, ...], nbytes: int) -> float:
    """The median of a few rounds on the slowest rank; the first makes the connections and does not count."""
    plan = Plan("probe", phases, 1, nbytes, 0.0, {}, "A measurement.")
    flat = torch.zeros(nbytes // 4, device=communicator.device)
    barrier = torch.zeros(BARRIER_NUMEL * communicator.size, device=communicator.device)
    times = []
    for _ in range(ROUNDS[nbytes] + 1):
        communicator.run(barrier, plan).wait()  # begin together; ranks leave a store's wait up to 50 ms apart
        began = time.perf_counter()
        communicator.run(flat, plan).wait()
        if communicator.device.type == "cuda":
            torch.cuda.synchronize(communicator.device)
        times.append(time.perf_counter() - began)
    slowest = consensus.decide(times[1:], _median_of_slowest)
    assert isinstance(slowest, float)
    return slowest


def _median_of_slowest(ranks: Sequence[object]) -> object:
    """The median round, of which the slowest rank counts."""
    rounds = zip(*(times for times in ranks if isinstance(times, list)), strict=True)
    return statistics.median(max(each) for each in rounds)
