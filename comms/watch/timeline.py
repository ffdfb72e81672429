"""Timeline of the last collectives of all ranks and groups, from the records of torch's flight recorder.

**Times.** A collective begins when it is issued, exact to the nanosecond. It ends at the poll that first saw its end,
which is late by up to `TRACE_POLL_SECONDS`. A message ends with the wait for it.

**Clocks.** No rank leaves an all-reduce before all have entered it, and no message is received before it was sent. So
each of them bounds the difference of two ranks' clocks, and no further messages are needed. Ranks that share no group
with the lowest rank are compared with it by way of other ranks.
"""

import math
from collections.abc import Mapping

from gradwire.comms.observe.recorder import Note
from gradwire.comms.observe.trace import KIND, Offset, chrome
from gradwire.comms.watch.collective import TRACE_POLL_SECONDS, TimelinePart, in_words, sender_of

MEETING = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")
"""Operations that no rank leaves before all ranks have entered them."""


def clock_offsets(parts: Mapping[int, TimelinePart]) -> dict[int, Offset]:
    """Returns by how much each rank's clock is ahead of the lowest rank's, from collectives and messages of both.

    Args:
        parts: Rank -> times of its last collectives and messages; of one rank at least.

    Returns:
        Rank -> offset, to be subtracted from the rank's times. Ranks are left out that no collective or message
        compares with the lowest one, also not by way of other ranks.
    """
    known = {min(parts): Offset(0.0, 0.0, 0.0)}
    reached = [min(parts)]
    for near in reached:
        for far in sorted(set(parts) - set(known)):
            low, high = _bounds(parts, near, far)
            if low > -math.inf and high < math.inf:
                error = known[near].error_seconds + (high - low) / 2
                known[far] = Offset(known[near].seconds + (low + high) / 2, error, 0.0)
                reached.append(far)
    return known


def _bounds(parts: Mapping[int, TimelinePart], near: int, far: int) -> tuple[float, float]:
    """Returns the bounds of the clock of rank `far` minus that of rank `near`; infinite if nothing bounds it."""
    low, high = -math.inf, math.inf
    for name in set(parts[near].groups) & set(parts[far].groups):
        theirs = {each.number: each for each in parts[far].groups[name]}
        sender = sender_of(name)
        for mine in parts[near].groups[name]:
            other = theirs.get(mine.number)
            if other is None or (sender is None and not any(kind in mine.what for kind in MEETING)):
                continue
            if other.ended is not None and sender in (None, near):
                high = min(high, other.ended - mine.began)
            if mine.ended is not None and sender in (None, far):
                low = max(low, other.began - mine.ended)
    return low, high


def timeline(parts: Mapping[int, TimelinePart], hosts: Mapping[int, str]) -> dict[str, object]:
    """Returns the contents of a file in the Trace Event Format: a process for each rank, a track for each group.

    Args:
        parts: Rank -> times of its last collectives, of the ranks that have responded. Times of a rank that
            `clock_offsets` leaves out are drawn by its own clock.
        hosts: Rank -> its host.
    """
    offsets = clock_offsets(parts)
    begins = [
        each.began - offsets[rank].seconds
        for rank, part in parts.items()
        if rank in offsets
        for some in part.groups.values()
        for each in some
    ]
    start = min(begins, default=0.0)
    notes: dict[int, list[Note]] = {}
    for rank, part in parts.items():
        ahead = offsets[rank].seconds if rank in offsets else 0.0
        notes[rank] = [
            Note(
                in_words(name),
                str(each),
                each.began - ahead - start,
                (part.seconds if each.ended is None else each.ended) - ahead - start,
                {"number": each.number, "under_way": each.ended is None},
            )
            for name, some in part.groups.items()
            for each in some
        ]
    about = {
        "kind": f"{KIND} of a watch",
        "ends_late_by_up_to_seconds": TRACE_POLL_SECONDS,
        "clock_error_seconds": {rank: each.error_seconds for rank, each in offsets.items()},
        "ranks_without_common_clock": sorted(set(parts) - set(offsets)),
    }
    return chrome(notes, [hosts.get(rank, "a host not known") for rank in range(max(parts) + 1)], about)
