"""Rules by which the hook, the watch and the doctor name stragglers and stalls: pure functions of records.

A *straggler* is a rank for which the others wait. A collective ends on all ranks at nearly the same moment, so of two
ranks the one that waited less arrived later, by the difference, whatever their clocks show. All three compare a rank's
wait with that of the median rank, and name it if it is behind by more than a margin; how often that must be so is up
to the caller, who knows how noisy its measure is.

A *stall* is a sequence of collectives in which a rank waits without progress. The ranks that have not issued the
collective in which the others wait are missing; if they wait in no other sequence, they are the cause.

This module does not import torch, so that the doctor can use it on machines without it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.topology.wording import MOST_RANKS, duration, ranks_in_words


@dataclass(frozen=True, slots=True)
class Margin:
    """Delay above which a rank is behind.

    Attributes:
        seconds: Least delay, in seconds.
        share: Least delay, as a share of the step or slice.
    """

    seconds: float
    share: float

    def of(self, seconds: float) -> float:
        """Returns the margin, in seconds, for a step or slice of `seconds`."""
        return max(self.seconds, self.share * seconds)


STRONG = Margin(0.05, 0.25)
"""Margin above which a few observations suffice: the chance of a false alarm is tiny."""


def median_rank(waits: Sequence[float]) -> int:
    """Returns the rank with the median wait, as an index in `waits`; of two in the middle the one that waited longer.

    So of two ranks the one that waited less is behind the median.

    Args:
        waits: Wait of each rank, in seconds; not empty.
    """
    return sorted(range(len(waits)), key=waits.__getitem__)[len(waits) // 2]


def behind_median(waits: Sequence[float]) -> list[float]:
    """Returns for each rank by how much less it waited than the median rank; negative if it waited more.

    Args:
        waits: Wait of each rank, in seconds; not empty.
    """
    middle = waits[median_rank(waits)]
    return [middle - each for each in waits]


def is_behind(delays: Sequence[float], lengths: Sequence[float], margin: Margin, *, exceptions: int = 0) -> bool:
    """Returns whether a rank arrived later than the median rank, by more than a margin, in all but a few observations.

    Args:
        delays: Time by which it waited less than the median rank, for each observation.
        lengths: Seconds that each observation covers.
        margin: Delay above which a rank is behind.
        exceptions: Number of observations in which it need not be.
    """
    late = sum(delay > margin.of(length) for delay, length in zip(delays, lengths, strict=True))
    return late >= len(delays) - exceptions


def excesses(activities: Mapping[int, Mapping[str, float]], rank: int) -> dict[str, float]:
    """Returns kind -> how much longer a rank does it than the median of the other ranks.

    Args:
        activities: Rank -> kind of activity -> seconds, or share of the time.
        rank: Rank that is compared.
    """
    others = [found for each, found in activities.items() if each != rank]
    return {
        kind: activities[rank].get(kind, 0.0) - statistics.median(found.get(kind, 0.0) for found in others)
        for kind in {kind for found in activities.values() for kind in found}
    }


@dataclass(frozen=True, slots=True)
class Position:
    """How far one rank has come in a sequence of collectives, or of messages between two ranks.

    Attributes:
        issued: Number of the last collective or message that it has issued, from 1.
        waits_in: Number of the collective or message in which it waits; None if it does not wait.
        seconds: Time without progress while it waits.
    """

    issued: int
    waits_in: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """A sequence of collectives, or of messages between two ranks, in which ranks wait without progress.

    Attributes:
        group: Name of the sequence: a process group, or a channel of messages.
        number: Number of the collective in which ranks wait, from 1; the earliest one if they wait in several.
        seconds: Longest time without progress of a waiting rank.
        waiting: Ranks that wait in this sequence.
        missing: Ranks that have not issued that collective, but still publish how far they are.
        silent: Ranks that no longer publish anything, or never did.
    """

    group: str
    number: int
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]


def find_stuck(
    group: str, ranks: Sequence[int], positions: Mapping[int, Position], silent: Sequence[int]
) -> Stuck | None:
    """Returns the earliest collective of a sequence in which a rank waits, and who is missing; None if none waits.

    Args:
        group: Name of the sequence.
        ranks: Ranks that take part in it.
        positions: Rank -> how far it has come; a rank that is neither here nor silent has not issued anything.
        silent: Ranks that no longer publish anything. What they published last is out of date.
    """
    waiting = {
        rank: at for rank, at in positions.items() if rank in ranks and at.waits_in is not None and rank not in silent
    }
    if not waiting:
        return None
    number = min(at.waits_in for at in waiting.values() if at.waits_in is not None)
    gone = tuple(rank for rank in ranks if rank in silent)
    missing = tuple(
        rank for rank in ranks if rank not in gone and (rank not in positions or positions[rank].issued < number)
    )
    return Stuck(group, number, max(at.seconds for at in waiting.values()), tuple(sorted(waiting)), missing, gone)


def origin(stuck: Sequence[Stuck]) -> Stuck | None:
    """Returns the first stuck sequence whose missing ranks wait in no other one, so that they cause the stall.

    None if there is no such one: then ranks wait for each other, and none of them can be named by what it waits for.

    Args:
        stuck: All stuck sequences, in order of preference.
    """
    waiting = {rank for each in stuck for rank in each.waiting}
    return next((each for each in stuck if not set(each.missing) & waiting), None)


def continues(stuck: Stuck, positions: Mapping[int, Position]) -> bool:
    """Returns whether training continues after a stall: each rank that waited has issued a later collective.

    The end of a collective is no proof, because one that fails ends as well.

    Args:
        stuck: The stall, as it was reported.
        positions: Rank -> its newest position in the same sequence.
    """
    return all(rank in positions and positions[rank].issued > stuck.number for rank in stuck.waiting)


@dataclass(frozen=True, slots=True)
class Issue:
    """One call of a rank, in the order of its calls.

    Attributes:
        group: Group or channel of the call.
        line: Line of the training script.
        sends: True if it sends a message.
    """

    group: str
    line: str | None
    sends: bool = False


LEAST_REPEATS = 3
"""Repetitions of a call after another one, without exception, that make it a habit of the script."""


def skipped_send(calls: Sequence[Issue]) -> Issue | None:
    """Returns the send that a rank has left out before its last call, if it made it each time before.

    The call before the last one has occurred earlier. If it was followed by the same send each time, and by something
    else this time, that send is missing.

    Args:
        calls: Calls of a rank, ascending; the last one is the one in which it waits.
    """
    if len(calls) < 2:
        return None
    *earlier, before, last = calls
    followers = [after for each, after in zip(earlier, [*earlier[1:], before], strict=True) if each == before]
    if len(followers) < LEAST_REPEATS or any(each != followers[0] for each in followers):
        return None
    return followers[0] if followers[0].sends and followers[0] != last else None


def stall_in_words(
    stuck: Stuck,
    what: str,
    hosts: Mapping[int, str],
    lines: Mapping[int, str],
    *,
    absent: str = "reached",
    waits: str | None = None,
    waited_in: str = "in it",
    rank_of: Callable[[int], int] = lambda rank: rank,
) -> str:
    """Returns a sentence about the ranks that have not reached a collective, those that wait, and where they are.

    Args:
        stuck: The stall.
        what: The collective: `bucket 7`, `collective 7 of group default`.
        hosts: Rank -> name of its host.
        lines: Rank -> line of the training script in which it is, of the missing ranks.
        absent: Verb for the missing ranks, which have not done it: `reached`, `sent`.
        waits: Clause about the ranks that wait; None leaves it out.
        waited_in: Place in which the ranks wait, if none is missing: `in it`, `in reduce_scatter intra_node`.
        rank_of: Returns the rank that is shown for a rank of `stuck`.
    """
    # All ranks wait in the collective itself.
    if not stuck.missing and not stuck.silent:
        return (
            f"all ranks have reached {what}, and have waited {waited_in} for {duration(stuck.seconds)}: no rank is "
            "late, a link is slow or broken"
        )
    # A clause for the missing ranks, one for silent ranks, one for those that wait, and the lines of the missing ones.
    parts = []
    for ranks, one, many in (
        (stuck.missing, f"has not {absent}", f"have not {absent}"),
        (stuck.silent, "does not respond, and has not ended", "do not respond, and have not ended"),
    ):
        if ranks:
            on = " and ".join(dict.fromkeys(hosts[rank] for rank in ranks[:MOST_RANKS] if rank in hosts))
            named = ranks_in_words([rank_of(rank) for rank in ranks])
            verb = one if len(ranks) == 1 else many
            parts.append(f"{named}{f' on {on}' if on else ''} {verb} {what}, {duration(stuck.seconds)} late")
    if waits is not None:
        parts.append(waits)
    parts += [f"rank {rank_of(rank)} is at {lines[rank]}" for rank in stuck.missing[:MOST_RANKS] if rank in lines]
    return "; ".join(parts)
