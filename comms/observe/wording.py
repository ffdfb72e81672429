"""Sentences about stalls, in the same words for the hook and the watch."""

from collections.abc import Callable, Mapping

from gradwire.comms.observe.diagnosis import Stuck
from gradwire.topology.wording import MOST_RANKS, duration, ranks_in_words


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
    """Says which ranks have not reached a collective, since when, who waits for them, and where they are.

    Args:
        stuck: The stall.
        what: The collective: `bucket 7`, `collective 7 of group default`.
        hosts: Rank -> name of its host.
        lines: Rank -> line of the training script in which it is, of the missing ranks.
        absent: What the missing ranks have not done: `reached`, `sent`.
        waits: Clause about the ranks that wait; None leaves it out.
        waited_in: In what they wait: `in it`, `in reduce_scatter intra_node`.
        rank_of: Returns the rank that is shown for a rank of `stuck`.
    """
    if not stuck.missing and not stuck.silent:
        return (
            f"all ranks have reached {what}, and have waited {waited_in} for {duration(stuck.seconds)}: no rank is "
            "late, a link is slow or broken"
        )
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
