"""Settings that are worth a trial: the best cuts for the measured arrivals, and what lies around them."""

from collections.abc import Sequence

from gradwire.comms.autotune.profile import Setting
from gradwire.comms.plan.cuts import optimal_cuts
from gradwire.comms.plan.planner import CHUNK_COUNTS, candidates
from gradwire.topology.cluster import Cluster

PLANS = ("hierarchical", "flat")


def propose(
    cluster: Cluster,
    incumbent: Setting,
    sizes: tuple[int, ...],
    arrivals: Sequence[float],
    plans: Sequence[str] = PLANS,
) -> list[Setting]:
    """Settings to try, the most promising first.

    Args:
        cluster: Where the ranks are and what the links give.
        incumbent: What is in use.
        sizes: Bytes of the step's buckets, in order.
        arrivals: When they come, in seconds.
        plans: Those that may be tried besides the incumbent's; none where the user asked for one by name.
    """
    if not sizes:
        return []
    other = [plan for plan in plans if plan != incumbent.plan] if _has_levels(cluster) else []
    settings = [_cut(cluster, incumbent.plan, sizes, arrivals, 1.0, "best cuts")]
    settings += [_cut(cluster, plan, sizes, arrivals, 1.0, f"best cuts, {plan}") for plan in other]
    settings += [
        _cut(cluster, incumbent.plan, sizes, arrivals, factor, label)
        for factor, label in ((4.0, "fewer cuts"), (0.25, "more cuts"))
    ]
    settings.append(Setting("every bucket alone", tuple(range(1, len(sizes) + 1)), sizes, 0, incumbent.plan, 0))
    settings.append(Setting("one transfer", (len(sizes),), sizes, 0, incumbent.plan, 0))
    best = settings[0]
    settings += [
        Setting(f"best cuts, {chunks} chunks", best.cuts, sizes, 0, best.plan, chunks)
        for chunks in CHUNK_COUNTS[:3]
        if best.plan != "flat"
    ]
    return settings


def affine(cluster: Cluster, plan: str, nbytes: int) -> tuple[float, float]:
    """Alpha and beta of a whole transfer: a line through the predictions for a small and a large one.

    Args:
        cluster: Where.
        plan: Name of the plan.
        nbytes: Size of the large one; the small one is an eighth of it.
    """
    large = max(nbytes, 8)
    small = large // 8
    slow, fast = (min(offer.seconds for offer in candidates(cluster, size, plan)) for size in (large, small))
    beta = (slow - fast) / (large - small)
    return max(fast - beta * small, 0.0), beta


def _cut(
    cluster: Cluster, plan: str, sizes: tuple[int, ...], arrivals: Sequence[float], factor: float, label: str
) -> Setting:
    alpha, beta = affine(cluster, plan, sum(sizes))
    return Setting(label, optimal_cuts(arrivals, sizes, alpha * factor, beta), sizes, 0, plan, 0)


def _has_levels(cluster: Cluster) -> bool:
    return sum(cluster.widest(level) > 1 for level in range(cluster.depth)) > 1
