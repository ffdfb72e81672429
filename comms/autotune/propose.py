"""Settings that are worth a trial: the best cuts for the measured arrivals, and the settings around them.

The best cuts come from a dynamic program over where the last transfer begins. One channel takes transfers one after
another; a transfer of b bytes costs alpha + beta b and cannot begin before its last bucket has arrived.
F[j] = min over i of max(F[i], r_j) + alpha + beta (b_i+1 + ... + b_j).
Source: the recurrence of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, section IV), whose greedy solution this makes exact.
"""

from collections.abc import Sequence
from itertools import accumulate

from gradwire.comms.autotune.profile import TunerSetting
from gradwire.comms.plan.planner import CHUNK_COUNTS, candidates
from gradwire.topology.cluster import Cluster

PLANS = ("hierarchical", "flat")


def propose(
    cluster: Cluster,
    incumbent: TunerSetting,
    sizes: tuple[int, ...],
    arrivals: Sequence[float],
    plans: Sequence[str] = PLANS,
) -> list[TunerSetting]:
    """Settings to try, the most promising first.

    Args:
        cluster: Where the ranks are and what the links give.
        incumbent: What is in use.
        sizes: Bytes of the step's buckets, in order.
        arrivals: When they arrive, in seconds.
        plans: Those that may be tried besides the incumbent's; none where the user asked for one by name.
    """
    if not sizes:
        return []
    other = [plan for plan in plans if plan != incumbent.plan] if len(cluster.wide_levels) > 1 else []
    settings = [_cut(cluster, incumbent.plan, sizes, arrivals, 1.0, "best cuts")]
    settings += [_cut(cluster, plan, sizes, arrivals, 1.0, f"best cuts, {plan}") for plan in other]
    settings += [
        _cut(cluster, incumbent.plan, sizes, arrivals, factor, label)
        for factor, label in ((4.0, "fewer cuts"), (0.25, "more cuts"))
    ]
    settings.append(TunerSetting("every bucket alone", tuple(range(1, len(sizes) + 1)), sizes, 0, incumbent.plan, 0))
    settings.append(TunerSetting("one transfer", (len(sizes),), sizes, 0, incumbent.plan, 0))
    best = settings[0]
    settings += [
        TunerSetting(f"best cuts, {chunks} chunks", best.cuts, sizes, 0, best.plan, chunks)
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
) -> TunerSetting:
    alpha, beta = affine(cluster, plan, sum(sizes))
    return TunerSetting(label, optimal_cuts(arrivals, sizes, alpha * factor, beta), sizes, 0, plan, 0)


def optimal_cuts(
    arrivals: Sequence[float], sizes: Sequence[int], alpha_seconds: float, seconds_per_byte: float
) -> tuple[int, ...]:
    """The cuts that let the last transfer end first; O(n^2) for n buckets.

    Args:
        arrivals: When each bucket arrives, in seconds, ascending.
        sizes: Bytes of each bucket.
        alpha_seconds: Of a transfer.
        seconds_per_byte: Of a transfer.

    Raises:
        ValueError: There are more arrivals than sizes, or the reverse.
    """
    if len(arrivals) != len(sizes):
        raise ValueError(f"`arrivals` has {len(arrivals)} entries; wanted {len(sizes)}, as many as `sizes`")
    before = [0, *accumulate(sizes)]
    finish = [0.0]
    begins = [0]
    for stop in range(1, len(sizes) + 1):
        best = min(
            range(stop),
            key=lambda start: (
                max(finish[start], arrivals[stop - 1])
                + alpha_seconds
                + seconds_per_byte * (before[stop] - before[start])
            ),
        )
        begins.append(best)
        finish.append(
            max(finish[best], arrivals[stop - 1]) + alpha_seconds + seconds_per_byte * (before[stop] - before[best])
        )
    cuts, stop = [], len(sizes)
    while stop:
        cuts.append(stop)
        stop = begins[stop]
    return tuple(reversed(cuts))
