"""Which plan: every candidate is priced with the cost model, and the flat one wins where hierarchy does not pay."""

from collections.abc import Iterator

from gradwire.comms.cost import CostModel, PhaseCost, busiest, pipelined_seconds
from gradwire.comms.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase, Plan
from gradwire.topology.cluster import Cluster

CHUNK_COUNTS = (1, 2, 4, 8, 16)
"""Candidates for the number of chunks; the optimum is flat, so powers of two are enough."""

MINIMUM_CHUNK_NBYTES = 512 * 1024
"""Chunks below this spend more on per-message cost than overlap returns (gloo over TCP, measured at 200 Mbit)."""

MINIMUM_GAIN = 0.02
"""A plan replaces the flat one only where it is predicted to save more than this share of its time."""


def plan_all_reduce(cluster: Cluster, nbytes: int, *, name: str = "auto", chunks: int = 0,
                    compressor: str | None = None, ratio: float = 1.0) -> Plan:
    """The cheapest plan for an all-reduce of one bucket.

    Args:
        cluster: Where the ranks are and what the links give.
        nbytes: Size of the bucket.
        name: `auto`, or the plan to force: `flat`, `hierarchical`, `leader`.
        chunks: Pieces to cut the bucket into; 0 chooses.
        compressor: Who shrinks the phase over the slowest level.
        ratio: Bytes on the wire over bytes of the region in that phase.

    Raises:
        ValueError: `name` is unknown.
    """
    names = ("flat", "hierarchical", "leader") if name == "auto" else (name,)
    plans = [plan for each in names for plan in candidates(cluster, nbytes, each, chunks, compressor, ratio)]
    best = min(plans, key=lambda plan: plan.seconds)
    if name != "auto":
        return with_reason(best, "Asked for by name.")
    flat = plans[0]
    if _only_flat(cluster):
        return with_reason(flat, "There is one level of links: a hierarchy has nothing to save.")
    if best.seconds > flat.seconds * (1 - MINIMUM_GAIN):
        return with_reason(flat, f"No hierarchy is predicted to be more than {MINIMUM_GAIN:.0%} faster.")
    return with_reason(best, f"Predicted {flat.seconds / best.seconds:.2f}x faster than a flat ring.")


def candidates(cluster: Cluster, nbytes: int, name: str, chunks: int = 0, compressor: str | None = None,
               ratio: float = 1.0) -> Iterator[Plan]:
    """Every priced plan of one name: one for each number of chunks worth trying."""
    phases = make_phases(cluster, name, compressor)
    model = CostModel(cluster, {phase.level: phase.parts for phase in phases if phase.op == REDUCE_SCATTER})
    whole = [_price(model, phase, nbytes, ratio) for phase in phases]
    for count in (chunks,) if chunks else CHUNK_COUNTS:
        if count == 1 or chunks or nbytes / count >= MINIMUM_CHUNK_NBYTES:
            pieces = [(phase.level, _price(model, phase, nbytes / count, ratio).seconds) for phase in phases]
            yield Plan(name, phases, count, nbytes, pipelined_seconds(pieces, count), busiest(cluster, whole), "")


def make_phases(cluster: Cluster, name: str, compressor: str | None = None) -> tuple[Phase, ...]:
    """The phases of a plan, levels without siblings left out.

    Raises:
        ValueError: `name` is unknown.
    """
    if name not in ("flat", "hierarchical", "leader"):
        raise ValueError(f"`plan` is {name!r}; wanted auto, flat, hierarchical or leader")
    levels = [level for level in range(cluster.depth) if cluster.widest(level) > 1]
    if not levels:
        return ()
    if name == "flat" or len(levels) == 1:
        return (Phase(ALL_REDUCE, levels[-1], whole=True, compressor=compressor),)
    *inner, top = levels
    parts = {level: cluster.widest(level) if name == "hierarchical" else 1 for level in inner}
    down = [Phase(REDUCE_SCATTER, level, parts[level]) for level in inner]
    up = [Phase(ALL_GATHER, level, parts[level]) for level in reversed(inner)]
    return (*down, Phase(ALL_REDUCE, top, compressor=compressor), *up)


def with_reason(plan: Plan, why: str) -> Plan:
    """The same plan with another reason."""
    return Plan(plan.name, plan.phases, plan.chunks, plan.nbytes, plan.seconds, plan.bytes_by_level, why)


def _only_flat(cluster: Cluster) -> bool:
    return sum(cluster.widest(level) > 1 for level in range(cluster.depth)) <= 1


def _price(model: CostModel, phase: Phase, nbytes: float, ratio: float) -> PhaseCost:
    return model.phase(phase, nbytes * (ratio if phase.compressor else 1.0))
