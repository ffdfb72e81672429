"""Measures the latency and the bandwidth of every level at start-up, on the groups that training will use.

`probe` times a small and a large all-reduce at each level, and solves the cost model's formula for the latency and the
bandwidth. The outer levels run after a reduce_scatter inside the node, as in a hierarchical plan, so that all NICs and
flows of a node are in use; the time of the inner levels is subtracted. All ranks measure at once, so the latency
includes the threads that forward a collective, and the cores that the ranks of a machine share.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.cost import CostModel
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase, Plan
from gradwire.topology.cluster import Cluster, Level, Link, Unit

SMALL_NBYTES = 16 << 10
"""Size of the small all-reduce in bytes: its time is latency alone, also if a shaper lets 64 kB pass at once."""

LARGE_NBYTES = 4 << 20
"""Largest size of the large all-reduce in bytes: latency is a small part of its time on 10 Gbit/s."""

LEAST_LARGE_NBYTES, LARGE_SECONDS = 1 << 20, 0.05
"""Smallest size of the large all-reduce in bytes, and the seconds that it may take before it is made smaller. Pieces of
an exchange between four ranks on two nodes stay as large as in training, where gloo sends them over two connections."""

INSIDE_NBYTES = 16 << 20
"""Size of the large all-reduce inside a node in bytes: more than the caches of its ranks hold, as in training."""

ROUNDS, WARM_UP_ROUNDS = (9, 3), (3, 1)
"""Number of timed rounds, and of warm-up rounds before them, each as (for the small size, for the large size). Short
rounds are disturbed more easily, and the first rounds make connections and threads."""

MANY, FEW = 8, 4
"""Numbers of chunks of the runs that show what chunks cost: `MANY` chunks of the small size each, and the large size
cut into `FEW` chunks."""

LARGEST_HIDDEN = 0.75
"""Largest share of an exchange that is taken to be idle; a disturbed measurement may give more."""

BARRIER_NUMEL = 64
"""Elements of the barrier for each rank: every rank owns a part, so none can leave before all have arrived."""

_known: dict[tuple[tuple[Unit, ...], str], tuple[Level, ...]] = {}
"""(Placement of the ranks, device type) -> levels as measured in this process."""


def probe(communicator: Communicator, consensus: Agreement) -> tuple[Level, ...]:
    """Measures the links of all levels, and makes the communicator plan with them; takes some seconds.

    Every rank calls it, with nothing in flight. Results are reused for the same placement and device in this process.

    Args:
        communicator: Communicator whose groups are measured.
        consensus: Object by which all its ranks agree on values.

    Returns:
        All levels of the cluster, from the inside, with the measured links; the same on all ranks.
    """
    # Reuse an earlier result only if all ranks have one.
    place = (communicator.cluster.locations, communicator.device.type)
    known = consensus.decide(place in _known, all)
    if not known:
        cluster = communicator.cluster
        wide = cluster.wide_levels
        # One trial on the outermost level shows how large the large size may be.
        trial: list[Run] = [(probe_phases(cluster, number), LEAST_LARGE_NBYTES, 1) for number in wide[-1:] if number]
        took = _measure(communicator, consensus, trial) if trial else {}
        large_nbytes = _affordable(max(took.values(), default=0.0))
        sizes = {number: large_nbytes if number else INSIDE_NBYTES for number in wide}
        # Time all runs before the links are fitted.
        runs = [run for number in wide for run in _runs(cluster, number, sizes[number], outermost=number == wide[-1])]
        took |= _measure(communicator, consensus, [run for run in runs if run not in took])
        # Fit level by level, from the inside: each needs the links of the levels inside it.
        levels = [replace(level, unit_rates=()) for level in cluster.levels]
        for number in wide:
            measured = replace(cluster, levels=tuple(levels))
            phases = probe_phases(cluster, number)
            small, large = (took[phases, nbytes, 1] for nbytes in (SMALL_NBYTES, sizes[number]))
            link = replace(
                fitted(measured, number, small, large, sizes[number]),
                on_processor=number == 0 and communicator.device.type == "cpu",
            )
            levels[number] = replace(levels[number], link=link)
        _known[place] = _with_shares(took, cluster, levels, large_nbytes, communicator.device.type)
    communicator.rank_plans.measured(_known[place])
    return _known[place]


Run = tuple[tuple[Phase, ...], int, int]
"""A timed all-reduce: (phases of the plan, bytes of the bucket, number of chunks). SMALL_NBYTES is the size of each
chunk, any other number that of the whole bucket."""


def _affordable(seconds: float) -> int:
    """Returns the size of the large all-reduce in bytes: as large as `LARGE_SECONDS` and the limits of sizes allow.

    Args:
        seconds: Measured time of an all-reduce of LEAST_LARGE_NBYTES.
    """
    nbytes = LEAST_LARGE_NBYTES
    while nbytes < LARGE_NBYTES and 2 * nbytes / LEAST_LARGE_NBYTES * seconds <= LARGE_SECONDS:
        nbytes *= 2
    return nbytes


def _runs(cluster: Cluster, number: int, large_nbytes: int, *, outermost: bool) -> list[Run]:
    """Returns the runs that have to be timed for one level: a small and a large all-reduce.

    For the outermost level, unless it is the inside of the nodes, these are added: the exchange of a compressor and a
    ring over all ranks, in one piece and in chunks.

    Args:
        cluster: Placement of the ranks.
        number: Index of the level in `cluster.levels`.
        large_nbytes: Size of the large all-reduce in bytes.
        outermost: True if the level is the outermost one in use.
    """
    phases = probe_phases(cluster, number)
    runs: list[Run] = [(phases, SMALL_NBYTES, 1), (phases, large_nbytes, 1)]
    if outermost and number > 0:
        exchange, ring = probe_phases(cluster, number, exchange=True), _ring(number)
        runs += [(exchange, SMALL_NBYTES, 1), (exchange, large_nbytes, 1)]
        runs += [(exchange, SMALL_NBYTES, MANY), (exchange, large_nbytes, FEW)]
        runs += [(ring, large_nbytes, 1), (ring, large_nbytes, FEW), (ring, SMALL_NBYTES, 1)]
    return runs


def _ring(number: int) -> tuple[Phase, ...]:
    """Returns the phases of a flat all-reduce, one ring through all ranks, without phases inside the nodes.

    Args:
        number: Index of the outermost level in use, whose links the ring crosses.
    """
    return (Phase(ALL_REDUCE, number, whole=True),)


def _with_shares(
    took: dict[Run, float], cluster: Cluster, levels: list[Level], large_nbytes: int, device_type: str
) -> tuple[Level, ...]:
    """Returns the levels, with the costs of chunks, payload exchanges and a ring over all ranks in the outermost link.

    With a single level it returns them unchanged.

    Args:
        took: Seconds of each run that was timed.
        cluster: Placement of the ranks.
        levels: Levels with the fitted links.
        large_nbytes: Size of the large all-reduce between nodes in bytes.
        device_type: `cpu` or `cuda`.
    """
    number = cluster.outermost
    if number == 0:
        return tuple(levels)
    cluster, link = replace(cluster, levels=tuple(levels)), levels[number].link
    exchange = probe_phases(cluster, number, exchange=True)
    small, large = (took[exchange, nbytes, 1] for nbytes in (SMALL_NBYTES, large_nbytes))
    gap = (took[exchange, SMALL_NBYTES, MANY] - small) / (MANY - 1)
    found = fitted(cluster, number, small, large, large_nbytes)
    hidden = (large - took[exchange, large_nbytes, FEW]) / (1 - 1 / FEW)
    link = replace(
        link,
        gap_seconds=max(gap, 0.0),
        exchange_share=found.bytes_per_second / link.bytes_per_second,
        exchange_alpha_seconds=found.alpha_seconds,
        exchange_gap_share=1 - min(max(hidden / large, 0.0), LARGEST_HIDDEN),
    )
    ring = _ring(number)
    model = CostModel(cluster, {}).phase(ring[0])
    # A ring in one piece waits at times, one in several pieces has more work: plans take the better of the two.
    seconds = min(took[ring, large_nbytes, chunks] for chunks in (1, FEW)) - took[ring, SMALL_NBYTES, 1]
    nccl = device_type == "cuda"  # NCCL may beat a ring, with a tree or sums in the switch
    share = model.seconds_per_byte * (large_nbytes - SMALL_NBYTES) / max(seconds, 1e-9)
    levels[number] = replace(levels[number], link=replace(link, ring_share=share if nccl else min(share, 1.0)))
    return tuple(levels)


def _parts(phases: tuple[Phase, ...]) -> dict[int, int]:
    """Returns level -> number of parts that a reduce_scatter at this level cuts the bucket into."""
    return {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER}


def probe_phases(cluster: Cluster, level: int, *, exchange: bool = False) -> tuple[Phase, ...]:
    """Returns the phases of an all_reduce at one level, between the reduce_scatters and all_gathers of inner levels.

    Args:
        cluster: Placement of the ranks.
        level: Index of the level.
        exchange: True replaces the all_reduce by a reduce_scatter and an all_gather, which send what a compressor's
            exchange sends.
    """
    inner = [number for number in cluster.wide_levels if number < level]
    parts = {number: cluster.widest(number) for number in inner}
    down = [Phase(REDUCE_SCATTER, number, parts[number]) for number in inner]
    up = [Phase(ALL_GATHER, number, parts[number]) for number in reversed(inner)]
    if not exchange:
        return (*down, Phase(ALL_REDUCE, level), *up)
    count = cluster.widest(level)
    return (*down, Phase(REDUCE_SCATTER, level, count), Phase(ALL_GATHER, level, count), *up)


def fitted(cluster: Cluster, level: int, small_seconds: float, large_seconds: float, large_nbytes: int) -> Link:
    """Fits the link of one level: its latency and its rate, so that the cost model predicts two measured times.

    Args:
        cluster: Placement of the ranks, with the measured links of the inner levels.
        level: Index of the level.
        small_seconds: Measured seconds of `probe_phases` with SMALL_NBYTES.
        large_seconds: Measured seconds of `probe_phases` with `large_nbytes`.
        large_nbytes: Size of the large all-reduce in bytes.
    """
    old = cluster.levels[level].link
    phases = probe_phases(cluster, level)
    model = CostModel(cluster, _parts(phases))
    costs = {phase: model.phase(phase) for phase in phases}
    small, large = (
        max(seconds - math.fsum(cost.seconds(nbytes) for phase, cost in costs.items() if phase.level != level), 1e-9)
        for seconds, nbytes in ((small_seconds, SMALL_NBYTES), (large_seconds, large_nbytes))
    )
    own = next(cost for phase, cost in costs.items() if phase.level == level)
    sent = own.seconds_per_byte * old.bytes_per_second  # bytes over the slowest link for each byte of bucket
    per_byte = max((large - small) / (large_nbytes - SMALL_NBYTES), 1e-13)
    messages = own.alpha_seconds / old.alpha_seconds if old.alpha_seconds else 1.0
    return replace(
        old,
        alpha_seconds=max(small - per_byte * SMALL_NBYTES, 0.0) / max(messages, 1.0),
        bytes_per_second=sent / per_byte,
        presumed=False,
    )


def line_up(communicator: Communicator) -> None:
    """Waits until all ranks have called it; they return within a fraction of a millisecond of each other.

    With a wait in the store, ranks would return up to 50 ms apart.

    Args:
        communicator: Communicator of the ranks, whose own connections are used.
    """
    cluster = communicator.cluster
    barrier = torch.zeros(BARRIER_NUMEL * communicator.size, dtype=torch.float32, device=communicator.device)
    phases = probe_phases(cluster, cluster.outermost)
    plan = Plan("barrier", phases, 1, barrier.nbytes, 0.0, {}, "Before a measurement.")
    communicator.run(barrier, plan).wait()


def _measure(communicator: Communicator, consensus: Agreement, runs: Sequence[Run]) -> dict[Run, float]:
    """Times runs on all ranks at once, and returns run -> median seconds of its rounds on the rank slowest in each.

    Every rank calls it, and gets the same result. The ranks share their times once, after all runs: each agreement
    takes every rank some requests to the store.

    Args:
        communicator: Communicator whose groups are measured.
        consensus: Object by which all its ranks agree on values.
        runs: Runs to time; the same on all ranks.
    """
    device = communicator.device
    times = []
    for phases, nbytes, chunks in runs:
        numel = nbytes // 4 * (chunks if nbytes == SMALL_NBYTES else 1)
        plan = Plan("probe", phases, chunks, 4 * numel, 0.0, {}, "A measurement.")
        flat = torch.zeros(numel, dtype=torch.float32, device=device)
        rounds, is_large = [], nbytes > SMALL_NBYTES
        for _ in range(WARM_UP_ROUNDS[is_large] + ROUNDS[is_large]):
            line_up(communicator)
            began = time.perf_counter()
            communicator.run(flat, plan).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rounds.append(time.perf_counter() - began)
        times.append(rounds[WARM_UP_ROUNDS[is_large] :])
    slowest = consensus.decide(times, _usual)
    assert isinstance(slowest, list)
    return dict(zip(runs, slowest, strict=True))


def _usual(ranks: Sequence[object]) -> object:
    """Returns the seconds of each run: the median over its rounds of the time that the slowest rank took in the round.

    Args:
        ranks: Times that each rank has measured: for each run, a list of the seconds of its rounds.

    Returns:
        A list with one number for each run.
    """
    by_run = zip(*(times for times in ranks if isinstance(times, list)), strict=True)
    return [statistics.median(max(each) for each in zip(*rounds, strict=True)) for rounds in by_run]
