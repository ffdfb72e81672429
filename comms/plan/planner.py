"""The planner: predicts candidate plans with the cost model; of exact sums a hierarchical one is taken only if faster.

Every rank plans by itself, and all must choose the same plan. Python 3.12 and later round `sum` of floats differently
from 3.11, so numbers that a plan depends on are added up by `math.fsum`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gradwire.comms.plan.cost import (
    EXACT,
    EXCHANGE_ROUNDS,
    CodecPrice,
    CostModel,
    PhaseCost,
    busiest,
    busiest_resource,
    exchange_cost,
    mixed_cost,
)
from gradwire.comms.plan.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    HALVING_DOUBLING,
    NVLS,
    NVLS_TREE,
    RATES_OPTION,
    REDUCE_SCATTER,
    RING,
    TREE,
    Phase,
    Plan,
)
from gradwire.topology.cluster import Cluster

if TYPE_CHECKING:
    from gradwire.comms.plan.nccl_model import NcclModel

CHUNK_COUNTS = (1, 2, 4, 8, 16)
"""Candidates for the number of chunks; the optimum is flat, so powers of two are enough."""

MINIMUM_CHUNK_NBYTES = 512 * 1024
"""Chunks below this spend more on per-message cost than overlap returns (gloo over TCP, measured at 200 Mbit)."""

CHUNK_TOLERANCE = 0.01
"""Share of the predicted time that more chunks may cost.

Of plans that differ only in chunks the one with most is taken, because collectives in flight together fill each other's
gaps, which the model does not include. Measured at 4x4 on 200 Mbit: 16 MB in 1135 ms with 2 chunks, 1084 with 4, 1063
with 8 (`bench/studies/hook_speed.py`, 2-core EPYC VM, 2026-11-21)."""

UNKNOWN_RATE_TOLERANCE = 0.12
"""`CHUNK_TOLERANCE` if a rate is assumed: a slow link loses more by few chunks than a fast one by many.

The plans for 10 Gbit/s, which are assumed, had 2 to 4 chunks; over 200 Mbit they took 1058 ms at 4x2 and 1121 at 4x4,
with 16 chunks 1037 and 1066 (16 MB, `bench/studies/hook_speed.py`, 2-core EPYC VM, 2026-11-22); fp16 at 2x2 took 399 ms
with 4 chunks and 372 with 8."""

LEAST_CUT_RATIO = 0.1
"""Least ratio of a compressor with which more chunks cost next to nothing: smaller payloads consist of headers and
incomplete blocks in part. Compressors with more rounds than an exchange (low rank) have factors for each chunk."""

OWNERS_CHUNK_COUNTS = (*CHUNK_COUNTS, 32, 48, 64)
OWNERS_CHUNK_SECONDS, OWNERS_CHUNK_NBYTES = 0.02, 128 * 1024
"""Smallest chunks with owners of unequal parts: seconds on the slowest link, and bytes. They exchange in two stages,
each of which uses the slowest link in one direction, and all chunks but the first and the last overlap."""

MINIMUM_GAIN = 0.02
"""Share of the flat plan's time that another plan must be predicted to save to replace it."""

NCCL_MINIMUM_GAIN = 0.10
"""`MINIMUM_GAIN` for GPUs whose links were not measured: NCCL's own estimates are no more accurate."""

HIERARCHY_HOST_SECONDS = 40e-6
"""Seconds that a hierarchy on GPUs must save for each chunk in addition: it makes three calls with events and streams
instead of one (at most 60 us to issue a bucket, less the 20 of plain DDP)."""

NCCL_NAMES = {RING: "NCCL's ring", TREE: "NCCL's tree", NVLS: "NCCL's NVLS", NVLS_TREE: "NCCL's NVLSTree"}

FLAT_ALGORITHMS = {"flat": RING, TREE: TREE, NVLS_TREE: NVLS_TREE, HALVING_DOUBLING: HALVING_DOUBLING}
"""Plans of one collective over all ranks, and the algorithm that each is priced as."""

PLAN_NAMES = (*FLAT_ALGORITHMS, "hierarchical", "leader")

COMPRESSED = "compressed"
"""Placeholder for a compressor's name in phases that are the same for all compressors."""

PROCESSOR = -1
"""Resource used by encoding, decoding and phases through shared memory, instead of the link of a level."""


def plan_all_reduce(
    cluster: Cluster,
    nbytes: int,
    *,
    name: str = "auto",
    chunks: int = 0,
    price: CodecPrice = EXACT,
    library: str = "gloo",
) -> Plan:
    """Returns the plan for an all-reduce of one bucket that is predicted to be the fastest, with the reason.

    With `auto` the flat plan stays unless another one is clearly faster, and also for one rank, for a cluster without a
    hierarchy, and with NCCL as long as the links' rates are unknown. With gloo it takes the most chunks that cost
    hardly any more time.

    Args:
        cluster: Placement of the ranks, and link rates.
        nbytes: Size of the bucket.
        name: `auto`, or the plan to force: `flat`, `hierarchical`, `leader`, or another name of `candidate_plans`.
        chunks: Number of chunks; 0 chooses.
        price: Cost of the compressor of the phase over the slowest level.
        library: Library that runs the flat plan: `gloo` runs a ring, `nccl` the fastest of ring, tree and, if the
            cluster has a fabric, NVLSTree.

    Raises:
        ValueError: `name` is unknown, or the cluster has no such plan.
    """
    # Predict every candidate.
    names = ("flat", "hierarchical", "leader") if name == "auto" else (name,)
    assumed = presumed(cluster)
    plans = [
        replace(plan, assumed=assumed)
        for each in names
        for plan in candidate_plans(cluster, nbytes, each, chunks, price)
    ]
    if library == "nccl" and not chunks and price.name == EXACT.name:
        # One call of NCCL fills its links by itself; the chunks' tolerance was measured on gloo.
        plans = [plan for plan in plans if plan.name not in FLAT_ALGORITHMS or plan.chunks == 1]
    # Take the fastest, and if only the number of chunks differs, the one with most chunks.
    best = min(plans, key=lambda plan: plan.seconds) if library == "nccl" else _most_chunks(plans, CHUNK_TOLERANCE)
    taken = best
    if assumed and library != "nccl" and _may_be_cut(price) and best.name not in FLAT_ALGORITHMS:
        taken = _most_chunks([plan for plan in plans if plan.name == best.name], UNKNOWN_RATE_TOLERANCE)
    if name != "auto":
        return with_reason(taken, "No other plan was considered.")
    # Keep the flat plan if there is no hierarchy, if rates are unknown, or if the gain is too small.
    flat = plans[0]
    if cluster.size == 1:
        return with_reason(flat, "There is one rank: nothing is sent.")
    if _only_flat(cluster):
        return with_reason(flat, "One node, or one rank on each: every plan is one all-reduce over all ranks.")
    if library == "nccl" and assumed:
        return with_reason(
            flat,
            f"How fast the links {assumed} are is not known: one NCCL call, until {RATES_OPTION}.",
        )
    if cluster.fabric is not None and library == "nccl":
        return _against_nccl(flat, [plan for plan in plans if plan.name not in FLAT_ALGORITHMS])
    rival = flat
    if library == "nccl":
        tree = next(candidate_plans(cluster, nbytes, TREE, 1, price))
        rival = min(flat, replace(tree, name="flat", assumed=assumed), key=lambda plan: plan.seconds)
    if best.seconds > rival.seconds * (1 - MINIMUM_GAIN):
        against = " than NCCL's tree" if rival is not flat else ""
        return with_reason(rival, f"No hierarchy is predicted to be more than {MINIMUM_GAIN:.0%} faster{against}.")
    than = "a flat ring" if rival is flat else "NCCL's tree"
    if assumed:
        # A report also shows rates measured since; they choose no plan, because bits must not depend on a clock.
        kept = "Rates measured since do not change the plan, so that results can be repeated."
        return with_reason(taken, f"Predicted faster than {than} at assumed rates. {kept}")
    return with_reason(best, f"Predicted {rival.seconds / best.seconds:.2f}x faster than {than}.")


def _may_be_cut(price: CodecPrice) -> bool:
    """Returns whether more chunks cost a compressor of this price next to nothing; see `LEAST_CUT_RATIO`."""
    return price.ratio >= LEAST_CUT_RATIO and price.rounds <= EXCHANGE_ROUNDS


def _against_nccl(flat: Plan, hierarchies: list[Plan]) -> Plan:
    """Returns the fastest hierarchy that gains enough over the fastest single NCCL call; without one, that call."""
    name = NCCL_NAMES[flat.phases[0].algorithm]

    def clear(plan: Plan) -> bool:
        enough = max(flat.seconds * NCCL_MINIMUM_GAIN, plan.chunks * HIERARCHY_HOST_SECONDS)
        return flat.seconds - plan.seconds > enough

    best = min(filter(clear, hierarchies), key=lambda plan: plan.seconds, default=None)
    if best is None:
        return with_reason(
            flat,
            f"{name} in one call: no hierarchy is predicted to be more than {NCCL_MINIMUM_GAIN:.0%} and "
            f"{HIERARCHY_HOST_SECONDS * 1e6:.0f} us a chunk faster.",
        )
    return with_reason(best, f"Predicted {flat.seconds / best.seconds:.2f}x faster than {name}.")


def presumed(cluster: Cluster) -> str:
    """Returns the levels whose link rates are unknown, in words; empty if all are known."""
    unknown = [number for number in cluster.wide_levels if cluster.levels[number].link.presumed]
    if unknown[:2] == [0, 1]:
        places = ["inside and between the nodes"]
    else:
        places = [("inside the nodes", "between the nodes")[number] for number in unknown if number < 2]
    return " and ".join(places + [cluster.levels[number].name for number in unknown if number > 1])


def _most_chunks(plans: list[Plan], tolerance: float) -> Plan:
    """Returns the fastest plan, cut into as many chunks as its predicted time allows.

    Args:
        plans: Plans of several names and numbers of chunks.
        tolerance: Part of the fastest plan's time that more chunks may add.
    """
    best = min(plans, key=lambda plan: plan.seconds)
    alike = [plan for plan in plans if plan.name == best.name and plan.seconds <= best.seconds * (1 + tolerance)]
    return max(alike, key=lambda plan: plan.chunks)


def candidate_plans(
    cluster: Cluster,
    nbytes: int,
    name: str,
    chunks: int = 0,
    price: CodecPrice = EXACT,
    *,
    by_links: bool | None = None,
) -> Iterator[Plan]:
    """Yields the plans of one name with their predictions, one for each number of chunks, one chunk first.

    If exact sums have equal parts (`Cluster.equal_sums`), payloads have them too, unless unequal owners are faster;
    with few chunks or small payloads they are not. Otherwise unequal links always have unequal owners, so that sums
    keep one order for all sizes.

    Args:
        cluster: Placement of the ranks, and link rates.
        nbytes: Size of the bucket.
        name: `flat`, `hierarchical`, `leader`, `tree`, `nvls_tree` or `halving_doubling`. With a fabric `flat` is the
            fastest single NCCL call, in one chunk unless another number is given.
        chunks: Number of chunks; 0 tries several.
        price: Cost of the compressor of the phase that is compressed.
        by_links: Whether owners of payloads have unequal parts although exact sums have equal ones; None takes the
            faster of both.

    Raises:
        ValueError: There is no plan of that name, or not on this cluster.
    """
    chosen = price
    if cluster.equal_sums and by_links is not True and price.owned > 0:
        equal = replace(price, owned=0.0)
        if by_links is False:
            chosen = equal
        elif any(phase.shares for phase in _phases_for(cluster, name, price)):
            both = [list(_priced(cluster, nbytes, name, chunks, each)) for each in (equal, price)]
            yield from min(both, key=lambda plans: min(plan.seconds for plan in plans))
            return
    yield from _priced(cluster, nbytes, name, chunks, chosen)


def _phases_for(cluster: Cluster, name: str, price: CodecPrice) -> tuple[Phase, ...]:
    """Returns the phases of a plan.

    Args:
        cluster: Placement of the ranks, and link rates.
        name: Name of the plan.
        price: Cost of the compressor; `EXACT` for none.
    """
    return make_phases(cluster, name, None if price.name == EXACT.name else price.name, owned=price.owned > 0)


def _priced(cluster: Cluster, nbytes: int, name: str, chunks: int, price: CodecPrice) -> Iterator[Plan]:
    """Yields the plans of one name with their predictions, one for each number of chunks; see `candidate_plans`.

    Args:
        cluster: Placement of the ranks, and link rates.
        nbytes: Size of the bucket.
        name: Name of the plan.
        chunks: Number of chunks; 0 tries several.
        price: Cost of the compressor; owners of payloads have unequal parts if `owned` is above 0.

    Raises:
        ValueError: The plan does not exist on this cluster.
    """
    # Make the phases, and on GPUs find the algorithm that NCCL would take for a flat plan.
    exact = price.name == EXACT.name
    phases = _phases_for(cluster, name, price)
    model = None
    if cluster.fabric is not None and name != HALVING_DOUBLING:
        from gradwire.comms.plan.nccl_model import nccl_model  # here: CPUs have no fabric

        model = nccl_model(cluster)
    if name == NVLS_TREE and exact and phases and (model is None or NVLS_TREE not in model.flat(nbytes)):
        raise ValueError("`name` is nvls_tree, but no NVSwitch of several nodes sums here; wanted another algorithm")
    algorithm = RING
    if model is not None and name == "flat" and exact and phases:
        algorithm, _ = model.best_flat(nbytes / (chunks or 1))
        phases = tuple(replace(phase, algorithm=algorithm) for phase in phases)
    # Price each phase for one byte of the bucket, and the bytes that leave each level.
    costs, shares = _costs(cluster, name, algorithm, 0.0 if exact else price.owned)
    costs = tuple(
        compressed_cost(cluster, phase, cost, price) if phase.compressor else cost
        for phase, cost in zip(phases, costs, strict=True)
    )
    encoded = [share for phase, share in zip(phases, shares, strict=True) if phase.compressor]
    traffic = busiest(
        cluster,
        [
            (cost, nbytes * price.ratio if phase.compressor else nbytes)
            for phase, cost in zip(phases, costs, strict=True)
        ],
    )
    # Decide which numbers of chunks to try.
    outermost = phases[len(phases) // 2].level if phases else 0  # down, across, up again
    gap = cluster.levels[outermost].link.gap_seconds
    counts: tuple[int, ...] = CHUNK_COUNTS
    least_nbytes = float(MINIMUM_CHUNK_NBYTES)
    if model is not None and exact and name in FLAT_ALGORITHMS:
        counts = (1,)
    elif any(phase.op == ALL_REDUCE and phase.shares for phase in phases):
        counts = OWNERS_CHUNK_COUNTS
        slowest = min(cluster.levels[outermost].unit_rates)
        least_nbytes = min(least_nbytes, max(slowest * OWNERS_CHUNK_SECONDS, OWNERS_CHUNK_NBYTES))
    # Predict each number of chunks: one chunk alone, and for each further one the time of the busiest resource.
    priced = list(zip(phases, costs, strict=True))
    takes = [
        cost.seconds if model is None else nccl_seconds(model, cluster, phase, cost, price) for phase, cost in priced
    ]
    for count in (chunks,) if chunks else counts:
        if count == 1 or chunks or nbytes / count >= least_nbytes:
            part = nbytes / count
            codec = math.fsum(price.seconds(part * share) for share in encoded)
            seconds = [take(part) for take in takes]
            alone = codec + math.fsum(seconds)
            pieces = [
                (
                    _taken(cluster, phase),
                    (took if gap is None else cost.byte_seconds(part))
                    - (1 - cost.byte_share) * cost.byte_seconds(part),
                )
                for (phase, cost), took in zip(priced, seconds, strict=True)
            ]
            level, busy = busiest_resource([*pieces, (PROCESSOR, codec + (gap or 0.0))])
            latency = math.fsum(
                cost.alpha_seconds if model is None else took - cost.byte_seconds(part)
                for (phase, cost), took in zip(priced, seconds, strict=True)
                if phase.level == level
            )
            limit = (
                "latency" if 2 * latency > busy else "processor" if level == PROCESSOR else cluster.levels[level].name
            )
            yield Plan(name, phases, count, nbytes, alone + (count - 1) * busy, traffic, "", limit, count * busy)


def _taken(cluster: Cluster, phase: Phase) -> int:
    """Returns the resource that a phase uses: the links of its level, or the processor for shared memory.

    Between hosts of one NVLink domain a GPU uses the links that it has inside its host, too.
    """
    link = cluster.levels[phase.level].link
    return PROCESSOR if link.on_processor else 0 if link.nvlink else phase.level


def nccl_seconds(
    model: "NcclModel", cluster: Cluster, phase: Phase, cost: PhaseCost, price: CodecPrice
) -> Callable[[float], float]:
    """Returns the function from bytes of a chunk to the seconds that NCCL needs for one phase.

    Args:
        model: NCCL's model of the cluster.
        cluster: Cluster of two levels.
        phase: Phase of a plan.
        cost: Cost of its bytes on the wire.
        price: Cost of its compressor, if it has one.
    """
    if phase.compressor is None and phase.whole:
        return lambda part: model.flat(part)[phase.algorithm]
    members, wire = cluster.size if phase.whole else cluster.widest(phase.level), cost.byte_seconds
    share = cost.egress.of_busiest_rank(phase.level)
    if phase.compressor is None:
        return lambda part: model.phase(phase, members, wire(part), share * part)
    ratio, rounds = price.ratio, price.rounds
    if not price.exchanged and not phase.whole:
        return lambda part: (
            rounds / EXCHANGE_ROUNDS * model.all_reduce_between(members, wire(part), share * part * ratio)
        )
    crossing, by_links = len(cluster.nodes) - 1, bool(phase.shares)
    return lambda part: model.exchange(members, crossing, wire(part), share * part * ratio, rounds, by_links=by_links)


def make_phases(cluster: Cluster, name: str, compressor: str | None = None, *, owned: bool = True) -> tuple[Phase, ...]:
    """Makes the phases of a plan, without levels that have a single unit.

    Args:
        cluster: Placement of the ranks, and link rates.
        name: Name of the plan.
        compressor: Name of the compressor of the phase over the slowest level; None is exact.
        owned: Whether any of the compressor's bytes go to owners; see `CodecPrice.owned`.

    Raises:
        ValueError: `name` is unknown.
    """
    if name not in PLAN_NAMES:
        raise ValueError(f"`plan` is {name!r}; wanted auto, flat, hierarchical or leader")
    levels = cluster.wide_levels
    if not levels:
        return ()
    *inner, top = levels
    shares: tuple[int, ...] = ()
    sizes: dict[int, tuple[int, ...]] = dict.fromkeys(inner, ())
    parts = {level: cluster.widest(level) if name == "hierarchical" else 1 for level in inner}
    if any(level.unit_rates for level in cluster.levels):
        from gradwire.comms.plan.owners import part_shares, rank_shares  # here: alike links have equal owners

        if not cluster.equal_sums or (compressor is not None and owned):
            shares = rank_shares(cluster, top)
        if not cluster.equal_sums:
            sizes = {level: part_shares(cluster, level, parts[level]) for level in inner}
    if name in FLAT_ALGORITHMS or not (inner or shares):
        return (Phase(ALL_REDUCE, top, whole=True, compressor=compressor, algorithm=FLAT_ALGORITHMS.get(name, RING)),)
    down = [Phase(REDUCE_SCATTER, level, parts[level], shares=sizes[level]) for level in inner]
    up = [Phase(ALL_GATHER, level, parts[level], shares=sizes[level]) for level in reversed(inner)]
    return (*down, Phase(ALL_REDUCE, top, compressor=compressor, shares=shares), *up)


def compressed_cost(cluster: Cluster, phase: Phase, cost: PhaseCost, price: CodecPrice) -> PhaseCost:
    """Returns the cost of a compressed phase on the wire, for each byte of the bucket.

    Args:
        cluster: Placement of the ranks, and link rates.
        phase: The phase.
        cost: Cost of the same phase without a compressor.
        price: Cost of the compressor; its seconds of encoding are not added here.
    """
    link = cluster.levels[phase.level].link
    if phase.whole and price.exchanged:
        cost = exchange_cost(cluster)
    alpha, per_byte = cost.alpha_seconds * price.rounds / EXCHANGE_ROUNDS, cost.seconds_per_byte * price.ratio
    if not price.exchanged:
        return replace(cost, alpha_seconds=alpha, seconds_per_byte=per_byte)
    if link.exchange_alpha_seconds is not None and not phase.whole:
        alpha = price.rounds * (cluster.widest(phase.level) - 1) * link.exchange_alpha_seconds
    return replace(
        cost,
        alpha_seconds=alpha,
        seconds_per_byte=per_byte / link.exchange_share,
        byte_share=cost.byte_share * link.exchange_gap_share,
    )


def _costs(
    cluster: Cluster, name: str, algorithm: str = RING, owned: float = 0.0
) -> tuple[tuple[PhaseCost, ...], tuple[float, ...]]:
    """Returns the costs of a plan's phases, and for each phase the largest share of the bucket that one rank handles.

    Args:
        cluster: Placement of the ranks, and link rates.
        name: Name of the plan.
        algorithm: Algorithm of the flat plan instead of a ring.
        owned: Part of a compressor's bytes that goes to owners; 0 without a compressor.
    """
    if 0 < owned < 1 and cluster.equal_sums:
        (those, largest), (others, _) = (_known_costs(cluster, name, algorithm, each) for each in (True, False))
        return tuple(mixed_cost(one, other, owned) for one, other in zip(those, others, strict=True)), largest
    return _known_costs(cluster, name, algorithm, owned > 0)


@lru_cache(maxsize=128)
def _known_costs(
    cluster: Cluster, name: str, algorithm: str, owned: bool
) -> tuple[tuple[PhaseCost, ...], tuple[float, ...]]:
    """Returns what `_costs` does if all bytes of a compressor go to owners, or none; cached.

    Args:
        cluster: Placement of the ranks, and link rates.
        name: Name of the plan.
        algorithm: Algorithm of the flat plan instead of a ring.
        owned: True if all bytes go to owners; False if none, and without a compressor.

    Returns:
        Cost of each phase; and the largest share of the bucket, 0 to 1, that one rank handles in each phase.
    """
    phases = make_phases(cluster, name, COMPRESSED if owned else None)
    if name == "flat":
        phases = tuple(replace(phase, algorithm=algorithm) for phase in phases)
    model = CostModel.of(cluster, phases)
    shares = [1.0 if phase.whole else float(model.shares(phase.level).max()) for phase in phases]
    return tuple(model.phase(phase) for phase in phases), tuple(shares)


def with_reason(plan: Plan, why: str) -> Plan:
    """Returns a copy of the plan with another reason, a sentence for reports."""
    return replace(plan, why=why)


def _only_flat(cluster: Cluster) -> bool:
    """Returns whether every plan is the flat one, because there is one level of links with equal rates."""
    return all(phase.whole for phase in make_phases(cluster, "hierarchical"))
