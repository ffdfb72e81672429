"""Alpha and beta of every level, measured at start-up on the groups that training will use.

Each level gets a small and a large all-reduce; the model's own formula, read backwards, turns the two times into a
latency and a bandwidth. The outer levels run below a reduce_scatter, as in a hierarchical plan, so that all cards and
flows of a node are in use; what the inner levels take is subtracted. All ranks measure at once, so the threads that
pass a collective on, and the cores that the ranks of a machine share, are in the latency.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.comms.autotune.consensus import Consensus
from gradwire.comms.communicator import Communicator
from gradwire.comms.plan.cost import CostModel
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase, Plan
from gradwire.topology.cluster import Cluster, Level, Link, Unit

SMALL_NBYTES = 16 << 10
"""Small enough to be latency alone, also where a traffic shaper lets the first 64 kB pass unshaped."""

LARGE_NBYTES = 4 << 20
"""Large enough that latency is a small part on 10 Gbit/s, small enough to take a third of a second on 200 Mbit/s."""

INSIDE_NBYTES = 16 << 20
"""In place of it inside a node: more than the caches of its ranks hold, as a model's gradients are."""

ROUNDS = {SMALL_NBYTES: 15, LARGE_NBYTES: 5, INSIDE_NBYTES: 5}
WARM_UP_ROUNDS = {SMALL_NBYTES: 4, LARGE_NBYTES: 1, INSIDE_NBYTES: 1}
"""What is short is disturbed more easily; the first rounds make connections and threads, and do not count."""

MANY, FEW = 8, 4
"""Chunks: of the small size each, and of the large one together."""

LARGEST_HIDDEN = 0.75
"""No more of an exchange than this is taken to be idle, whatever a disturbed measurement says."""

BARRIER_NUMEL = 64
"""For each rank: so that every rank has a part in it, and none can leave before all have arrived."""

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
        levels = [replace(level, unit_rates=()) for level in communicator.cluster.levels]
        ruler = _Ruler(communicator, consensus)
        for number in range(communicator.cluster.depth):
            if communicator.cluster.widest(number) > 1:
                cluster = replace(communicator.cluster, levels=tuple(levels))
                phases = probe_phases(cluster, number)
                small, large = (ruler.seconds(phases, nbytes) for nbytes in (SMALL_NBYTES, large_nbytes(number)))
                link = replace(
                    fitted(cluster, number, small, large),
                    on_processor=number == 0 and communicator.device.type == "cpu",
                )
                levels[number] = replace(levels[number], link=link)
        _known[place] = _with_shares(ruler, communicator.cluster, levels)
    communicator.routes.measured(_known[place])
    return _known[place]


def _with_shares(ruler: "_Ruler", cluster: Cluster, levels: list[Level]) -> tuple[Level, ...]:
    """The levels, with how the outermost one stands chunks, exchanges of payloads, and a ring through all ranks."""
    number = max((each for each in range(len(levels)) if cluster.widest(each) > 1), default=0)
    if number == 0:
        return tuple(levels)
    cluster, link = replace(cluster, levels=tuple(levels)), levels[number].link
    exchange = probe_phases(cluster, number, exchange=True)
    small, large = (ruler.seconds(exchange, nbytes) for nbytes in (SMALL_NBYTES, LARGE_NBYTES))
    gap = (ruler.seconds(exchange, SMALL_NBYTES, MANY) - small) / (MANY - 1)
    found = fitted(cluster, number, small, large)
    hidden = (large - ruler.seconds(exchange, LARGE_NBYTES, FEW)) / (1 - 1 / FEW)
    link = replace(
        link,
        gap_seconds=max(gap, 0.0),
        exchange_share=found.bytes_per_second / link.bytes_per_second,
        exchange_alpha_seconds=found.alpha_seconds,
        exchange_gap_share=1 - min(max(hidden / large, 0.0), LARGEST_HIDDEN),
    )
    ring = (Phase(ALL_REDUCE, number, whole=True),)
    model = CostModel(cluster, {}).phase(ring[0])
    # In one piece it waits at times, in several it works more: a plan takes the better.
    took = min(ruler.seconds(ring, LARGE_NBYTES, chunks) for chunks in (1, FEW)) - ruler.seconds(ring, SMALL_NBYTES)
    nccl = ruler.device_type == "cuda"  # may well beat a ring: it takes a tree, or lets the switch sum
    share = model.seconds_per_byte * (LARGE_NBYTES - SMALL_NBYTES) / max(took, 1e-9)
    levels[number] = replace(levels[number], link=replace(link, ring_share=share if nccl else min(share, 1.0)))
    return tuple(levels)


def _parts(phases: tuple[Phase, ...]) -> dict[int, int]:
    return {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER}


def large_nbytes(level: int) -> int:
    """Bytes that a level's bandwidth is measured with."""
    return INSIDE_NBYTES if level == 0 else LARGE_NBYTES


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
        large_seconds: With `large_nbytes(level)`.
    """
    old = cluster.levels[level].link
    phases = probe_phases(cluster, level)
    model = CostModel(cluster, _parts(phases))
    costs = {phase: model.phase(phase) for phase in phases}
    small, large = (
        max(seconds - sum(cost.seconds(nbytes) for phase, cost in costs.items() if phase.level != level), 1e-9)
        for seconds, nbytes in ((small_seconds, SMALL_NBYTES), (large_seconds, large_nbytes(level)))
    )
    own = next(cost for phase, cost in costs.items() if phase.level == level)
    sent = own.seconds_per_byte * old.bytes_per_second  # bytes over the slowest link for each byte of bucket
    per_byte = max((large - small) / (large_nbytes(level) - SMALL_NBYTES), 1e-13)
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
    level = max(
        (number for number in range(communicator.cluster.depth) if communicator.cluster.widest(number) > 1), default=0
    )
    barrier = torch.zeros(BARRIER_NUMEL * communicator.size, device=communicator.device)
    plan = Plan(
        "barrier", probe_phases(communicator.cluster, level), 1, barrier.nbytes, 0.0, {}, "Before a measurement."
    )
    communicator.run(barrier, plan).wait()


class _Ruler:
    """Times plans on all ranks at once.

    Args:
        communicator: Whose groups are used.
        consensus: All its ranks'.
    """

    def __init__(self, communicator: Communicator, consensus: Consensus) -> None:
        self._communicator = communicator
        self._consensus = consensus
        self.device_type = communicator.device.type

    def seconds(self, phases: tuple[Phase, ...], nbytes: int, chunks: int = 1) -> float:
        """A usual round, of which the slowest rank counts.

        Args:
            phases: What is run.
            nbytes: Of the bucket; of a chunk, where it is SMALL_NBYTES.
            chunks: Pieces that the bucket travels in.
        """
        numel = nbytes // 4 * (chunks if nbytes == SMALL_NBYTES else 1)
        plan = Plan("probe", phases, chunks, 4 * numel, 0.0, {}, "A measurement.")
        device = self._communicator.device
        flat = torch.zeros(numel, device=device)
        times = []
        for _ in range(WARM_UP_ROUNDS[nbytes] + ROUNDS[nbytes]):
            line_up(self._communicator)
            began = time.perf_counter()
            self._communicator.run(flat, plan).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        slowest = self._consensus.decide(times[WARM_UP_ROUNDS[nbytes] :], _usual)
        assert isinstance(slowest, float)
        return slowest


def _usual(ranks: Sequence[object]) -> object:
    """The median round, of which the slowest rank counts."""
    return statistics.median(
        max(each) for each in zip(*(times for times in ranks if isinstance(times, list)), strict=True)
    )
