"""Alpha and beta of every level, measured at start-up on the groups that training will use.

Each level gets a small and a large all-reduce; the model's own formula, read backwards, turns the two times into a
latency and a bandwidth. The outer levels run below a reduce_scatter, as in a hierarchical plan, so that all NICs and
flows of a node are in use; what the inner levels take is subtracted. All ranks measure at once, so the threads that
pass a collective on, and the cores that the ranks of a machine share, are in the latency.
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
"""Bytes small enough to be latency alone, also where a traffic shaper lets the first 64 kB pass unshaped."""

LARGE_NBYTES = 4 << 20
"""Most bytes of the large size: latency is then a small part on 10 Gbit/s."""

LEAST_LARGE_NBYTES, LARGE_SECONDS = 1 << 20, 0.05
"""Fewer bytes where they would take longer than that; but pieces of an exchange between four ranks on two nodes stay as
large as training's, which gloo sends over two connections."""

INSIDE_NBYTES = 16 << 20
"""Bytes in place of it inside a node: more than the caches of its ranks hold, as a model's gradients are."""

ROUNDS, WARM_UP_ROUNDS = (9, 3), (3, 1)
"""Rounds that count, and those before them, of SMALL_NBYTES and of more. What is short is disturbed more easily; the
first rounds make connections and threads."""

MANY, FEW = 8, 4
"""Chunks: of the small size each, and of the large one together."""

LARGEST_HIDDEN = 0.75
"""No more of an exchange than this is taken to be idle, whatever a disturbed measurement says."""

BARRIER_NUMEL = 64
"""Elements for each rank: so that every rank has a part in it, and none can leave before all have arrived."""

_known: dict[tuple[tuple[Unit, ...], str], tuple[Level, ...]] = {}


def probe(communicator: Communicator, consensus: Agreement) -> tuple[Level, ...]:
    """Measures all levels and has the communicator plan with them; every rank, before anything else is in flight.

    Results are kept for the same placement and device in this process.

    Args:
        communicator: Whose groups are measured.
        consensus: All its ranks'.
    """
    place = (communicator.cluster.locations, communicator.device.type)
    known = consensus.decide(place in _known, all)
    if not known:
        cluster = communicator.cluster
        wide = cluster.wide_levels
        trial: list[Run] = [(probe_phases(cluster, number), LEAST_LARGE_NBYTES, 1) for number in wide[-1:] if number]
        took = _measure(communicator, consensus, trial) if trial else {}
        large_nbytes = _affordable(max(took.values(), default=0.0))
        sizes = {number: large_nbytes if number else INSIDE_NBYTES for number in wide}
        runs = [run for number in wide for run in _runs(cluster, number, sizes[number], outermost=number == wide[-1])]
        took |= _measure(communicator, consensus, [run for run in runs if run not in took])
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
"""What is timed: phases, bytes of the bucket (of a chunk, where they are SMALL_NBYTES), chunks."""


def _affordable(seconds: float) -> int:
    """Bytes to measure a bandwidth with, where LEAST_LARGE_NBYTES take so long."""
    nbytes = LEAST_LARGE_NBYTES
    while nbytes < LARGE_NBYTES and 2 * nbytes / LEAST_LARGE_NBYTES * seconds <= LARGE_SECONDS:
        nbytes *= 2
    return nbytes


def _runs(cluster: Cluster, number: int, large_nbytes: int, *, outermost: bool) -> list[Run]:
    """What has to be timed for one level."""
    phases = probe_phases(cluster, number)
    found: list[Run] = [(phases, SMALL_NBYTES, 1), (phases, large_nbytes, 1)]
    if outermost and number > 0:
        exchange, ring = probe_phases(cluster, number, exchange=True), _ring(number)
        found += [(exchange, SMALL_NBYTES, 1), (exchange, large_nbytes, 1)]
        found += [(exchange, SMALL_NBYTES, MANY), (exchange, large_nbytes, FEW)]
        found += [(ring, large_nbytes, 1), (ring, large_nbytes, FEW), (ring, SMALL_NBYTES, 1)]
    return found


def _ring(number: int) -> tuple[Phase, ...]:
    """One ring through all ranks."""
    return (Phase(ALL_REDUCE, number, whole=True),)


def _with_shares(
    took: dict[Run, float], cluster: Cluster, levels: list[Level], large_nbytes: int, device_type: str
) -> tuple[Level, ...]:
    """The levels, with how the outermost one stands chunks, exchanges of payloads, and a ring through all ranks."""
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
    # In one piece it waits at times, in several it works more: a plan takes the better.
    seconds = min(took[ring, large_nbytes, chunks] for chunks in (1, FEW)) - took[ring, SMALL_NBYTES, 1]
    nccl = device_type == "cuda"  # may well beat a ring: it takes a tree, or lets the switch sum
    share = model.seconds_per_byte * (large_nbytes - SMALL_NBYTES) / max(seconds, 1e-9)
    levels[number] = replace(levels[number], link=replace(link, ring_share=share if nccl else min(share, 1.0)))
    return tuple(levels)


def _parts(phases: tuple[Phase, ...]) -> dict[int, int]:
    return {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER}


def probe_phases(cluster: Cluster, level: int, *, exchange: bool = False) -> tuple[Phase, ...]:
    """An all_reduce at one level, below the reduce_scatters and above the all_gathers of those inside.

    Args:
        cluster: Where.
        level: Which.
        exchange: Take it apart into a reduce_scatter and an all_gather, which move what a compressor's exchange moves.
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
    """The link of one level that explains two measured times, given the links of the levels inside.

    Args:
        cluster: With the links of the inner levels as measured.
        level: Which.
        small_seconds: Of `probe_phases` with SMALL_NBYTES.
        large_seconds: With `large_nbytes`.
        large_nbytes: What the bandwidth is measured with.
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
    """Returns when all ranks have arrived, within a fraction of a millisecond: they leave a store's wait 50 ms apart.

    Args:
        communicator: Whose own connections carry the word.
    """
    cluster = communicator.cluster
    barrier = torch.zeros(BARRIER_NUMEL * communicator.size, dtype=torch.float32, device=communicator.device)
    phases = probe_phases(cluster, cluster.outermost)
    plan = Plan("barrier", phases, 1, barrier.nbytes, 0.0, {}, "Before a measurement.")
    communicator.run(barrier, plan).wait()


def _measure(communicator: Communicator, consensus: Agreement, runs: Sequence[Run]) -> dict[Run, float]:
    """Times plans on all ranks at once: of each a usual round, of which the slowest rank counts.

    All are timed before the ranks exchange what they have seen: each exchange costs every rank some questions to the
    store, and a start would have a dozen of them.
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
    """The median round of each run, of which the slowest rank counts."""
    by_run = zip(*(times for times in ranks if isinstance(times, list)), strict=True)
    return [statistics.median(max(each) for each in zip(*rounds, strict=True)) for rounds in by_run]
