"""The best cuts of a sequence of buckets, exactly: a dynamic program over where the last transfer begins.

One channel takes transfers one after another; a transfer of b bytes costs alpha + beta b and cannot begin before its
last bucket has come. F[j] = min over i of max(F[i], r_j) + alpha + beta (b_i+1 + ... + b_j).
Source: the recurrence of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, section IV), whose greedy answer this makes exact.
"""

from collections.abc import Sequence
from itertools import accumulate


def finish_seconds(
    cuts: Sequence[int], arrivals: Sequence[float], sizes: Sequence[int], alpha_seconds: float, seconds_per_byte: float
) -> float:
    """When the last transfer is done.

    Args:
        cuts: Each transfer's end, counted in buckets; buckets behind the last cut form one more.
        arrivals: When each bucket comes, in seconds, ascending.
        sizes: Bytes of each bucket.
        alpha_seconds: Of a transfer.
        seconds_per_byte: Of a transfer.
    """
    finish, start = 0.0, 0
    for stop in (*cuts, len(sizes)):
        if stop > start:
            finish = max(finish, arrivals[stop - 1]) + alpha_seconds + seconds_per_byte * sum(sizes[start:stop])
            start = stop
    return finish


def optimal_cuts(
    arrivals: Sequence[float], sizes: Sequence[int], alpha_seconds: float, seconds_per_byte: float
) -> tuple[int, ...]:
    """The cuts that let the last transfer end first; O(n^2) for n buckets.

    Args:
        arrivals: As for `finish_seconds`.
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
