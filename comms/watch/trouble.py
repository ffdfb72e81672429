"""What hangs, and which ranks disagree: what the ranks' last collectives mean, side by side."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradwire.comms.report import duration
from gradwire.comms.watch.collective import IssuedCollective, one_in_words, sender_of
from gradwire.comms.watch.rank import RankStatus

MOST_NAMED = 8
"""Ranks in one sentence."""

LOST_CONNECTION = ("gloo/transport/", "DistBackendError", "DistNetworkError")
"""Parts of torch 2.13's errors in ranks whose collective fails because another rank has ended: of gloo the file that
raises it, of NCCL the class. Torch's flight recorder states a collective that failed like one that ended well."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A group in which nothing moves.

    Attributes:
        group: Its name.
        number: Of the collective that ranks wait in.
        seconds: For how long.
        waiting: Ranks that have issued it.
        missing: Ranks that have not.
        silent: Ranks that say nothing any more, or never did.
    """

    group: str
    number: int
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]


def find_stuck(
    statuses: Mapping[int, RankStatus], members: Mapping[str, Sequence[int]], silent: Sequence[int], seconds: float
) -> list[Stuck]:
    """The groups in which a rank has waited in one collective for too long, the longest first.

    Args:
        statuses: Of the ranks, newest.
        members: Group's name -> its ranks.
        silent: Ranks whose statuses are old.
        seconds: What is too long.
    """
    found = []
    for name, ranks in members.items():
        states = {
            rank: statuses[rank].groups[name] for rank in ranks if rank in statuses and name in statuses[rank].groups
        }
        waits = {rank: state for rank, state in states.items() if state.issued > state.ended and rank not in silent}
        if not any(state.still_seconds >= seconds for state in waits.values()):
            continue
        number = min(state.ended for state in waits.values()) + 1
        quiet = tuple(rank for rank in ranks if rank in silent or rank not in statuses)
        missing = tuple(
            rank for rank in ranks if rank not in quiet and (rank not in states or states[rank].issued < number)
        )
        longest = max(state.still_seconds for state in waits.values())
        found.append(Stuck(name, number, longest, tuple(waits), missing, quiet))
    return sorted(found, key=lambda stuck: -stuck.seconds)


def origin(stuck: Sequence[Stuck]) -> Stuck | None:
    """The group that others which hang wait for: its missing ranks wait in no other one."""
    waiting = {rank for each in stuck for rank in each.waiting}
    roots = [each for each in stuck if not set(each.missing) & waiting]
    return next(iter(roots or stuck), None)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks of a group that do not issue the same collective.

    Attributes:
        group: Its name.
        number: Of the first collective in which they differ.
        issued: What each rank has issued under this number.
        by_line_alone: Operations and shapes are the same; the lines that issued them are not.
    """

    group: str
    number: int
    issued: Mapping[int, IssuedCollective]
    by_line_alone: bool = False

    def __str__(self) -> str:
        kinds: dict[tuple[str, str | None], list[int]] = {}
        for rank, each in sorted(self.issued.items()):
            kinds.setdefault((str(each), each.line), []).append(rank)
        parts = [
            f"{ranks_in_words(ranks)} issued {what}" + (f" at {line}" if line else "")
            for (what, line), ranks in sorted(kinds.items(), key=lambda item: -len(item[1]))
        ]
        how = (
            "by their lines alone, as if one of them had left out or swapped a collective" if self.by_line_alone else ""
        )
        of = one_in_words(self.group, self.number)
        head = (
            f"the ranks of {of.partition(' of ')[2]} disagree in {of.partition(' of ')[0]}"
            if sender_of(self.group) is None
            else f"its sender and its receiver disagree in {of}"
        )
        return f"{head}{' ' if how else ''}{how}: {'; '.join(parts)}"


def find_disagreement(
    group: str, issued: Mapping[int, Sequence[IssuedCollective]], *, lines: bool
) -> Disagreement | None:
    """The first collective in which ranks differ.

    Args:
        group: Its name.
        issued: Rank -> its last collectives, ascending.
        lines: Also where operations and shapes are equal and the lines that asked for them are not; a script may have
            ranks ask from different lines without a fault.
    """
    numbered = {rank: {each.number: each for each in some} for rank, some in issued.items() if some}
    if len(numbered) < 2:
        return None
    common = sorted(set.intersection(*(set(some) for some in numbered.values())))
    for by_line in (False, True) if lines else (False,):
        for number in common:
            here = {rank: some[number] for rank, some in numbered.items()}
            if len({each.line if by_line else each.what for each in here.values()}) > 1:
                return Disagreement(group, number, here, by_line)
    return None


def find_disagreements(responses: Mapping[int, Mapping[str, Sequence[IssuedCollective]]]) -> Iterator[Disagreement]:
    """Yields where the ranks of each group differ first.

    Args:
        responses: Rank -> group's name -> its last collectives, ascending.
    """
    for name in dict.fromkeys(name for response in responses.values() for name in response):
        issued = {rank: response[name] for rank, response in responses.items() if name in response}
        found = find_disagreement(name, issued, lines=sender_of(name) is None)
        if found is not None:
            yield found


def find_absent(
    responses: Mapping[int, Mapping[str, Sequence[IssuedCollective]]],
    statuses: Mapping[int, RankStatus],
    members: Mapping[str, Sequence[int]],
    quiet_seconds: Mapping[int, float],
) -> Iterator[Stuck]:
    """Yields the collectives that ranks end in because a connection was lost, where other ranks do not response.

    Args:
        responses: Rank -> group's name -> its last collectives, ascending; of the ranks that have answered.
        statuses: Of the ranks, newest.
        members: Group's name -> its ranks.
        quiet_seconds: Rank -> how old its newest status is.
    """
    failed: dict[str, dict[int, int]] = {}
    for rank, response in responses.items():
        status = statuses.get(rank)
        if status is not None and status.leaves is not None and any(sign in status.leaves for sign in LOST_CONNECTION):
            last = [(each[-1].began, name) for name, each in response.items() if each and sender_of(name) is None]
            if last:  # the one that it has issued last has failed
                name = max(last)[1]
                failed.setdefault(name, {})[rank] = response[name][-1].number
    for name, numbers in failed.items():
        number = max(numbers.values())
        absent = tuple(rank for rank in members.get(name, ()) if rank not in responses)
        if absent:  # whether they had come to it is not known: their last statuses may be older
            waiting = tuple(sorted(rank for rank, last in numbers.items() if last == number))
            yield Stuck(name, number, max(quiet_seconds[rank] for rank in absent), waiting, (), absent)


def stuck_in_words(
    stuck: Stuck,
    statuses: Mapping[int, RankStatus],
    issued: Mapping[int, Sequence[IssuedCollective]],
    hosts: Mapping[int, str],
) -> str:
    """Which ranks have not come to what, and where they are.

    Args:
        stuck: What hangs.
        statuses: Of the ranks, newest.
        issued: Rank -> its last collectives of the group.
        hosts: Rank -> its host.
    """
    here = [each for rank in stuck.waiting for each in issued.get(rank, ()) if each.number == stuck.number]
    what = one_in_words(stuck.group, stuck.number)
    if here:
        common, _ = Counter((str(each), each.line) for each in here).most_common(1)[0]
        what += f" ({common[0]}" + (f", issued at {common[1]})" if common[1] else ")")
    sender = sender_of(stuck.group)
    absent = "not come to" if sender is None else "not sent" if stuck.missing == (sender,) else "not asked for"
    parts = []
    for ranks, verb in ((stuck.missing, absent), (stuck.silent, "said nothing for a while, and not ended")):
        if ranks:
            hosted = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks[:MOST_NAMED] if rank in hosts))
            parts.append(
                f"{ranks_in_words(ranks)}{f' on {hosted}' if hosted else ''} "
                f"{'has' if len(ranks) == 1 else 'have'} {verb} {what}, {duration(stuck.seconds)} late"
            )
    if not parts:
        parts.append(
            f"all ranks have come to {what} and have waited in it for {duration(stuck.seconds)}: a link is slow or "
            "broken"
        )
    elif stuck.waiting:
        how = "in" if sender is None else "for"
        parts.append(f"{ranks_in_words(stuck.waiting)} wait{'s' * (len(stuck.waiting) == 1)} {how} it")
    for rank in stuck.missing[:MOST_NAMED]:
        status = statuses[rank]
        if status.leaves is not None:
            parts.append(f"rank {rank} ends with {status.leaves}")
        elif status.at is not None:
            parts.append(f"rank {rank} is at {status.at}")
    for rank in stuck.silent[:MOST_NAMED]:
        if rank in statuses and (why := statuses[rank].leaves) is not None:
            parts.append(f"rank {rank} ended with {why}")
    return "; ".join(parts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`; `ranks 0, 1, 2`; of many the first ones."""
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
