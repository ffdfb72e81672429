"""Diagnosis of stalls and disagreements from the statuses and the last collectives of all ranks.

The rules for stalls are those of `comms/observe/diagnosis.py`. This module brings the watch's records into their form,
finds out which rank left a send out if ranks wait for each other, and compares what ranks have issued.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradwire.comms.observe.diagnosis import Issue, Position, Stuck, find_stuck, origin, skipped_send, stall_in_words
from gradwire.comms.watch.collective import IssuedCollective, one_in_words, sender_of
from gradwire.comms.watch.rank import RankStatus
from gradwire.topology.wording import MOST_RANKS, ranks_in_words

LOST_CONNECTION = ("gloo/transport/", "DistBackendError", "DistNetworkError")
"""Parts of torch 2.13's errors in ranks whose collective fails because another rank has ended: for gloo the file that
raises it, for NCCL the class. Torch's flight recorder states that a collective that failed has ended."""

Responses = Mapping[int, Mapping[str, Sequence[IssuedCollective]]]
"""Rank -> group or channel -> its last collectives or messages, ascending; of the ranks that have responded."""


def positions_in(name: str, statuses: Mapping[int, RankStatus]) -> dict[int, Position]:
    """Returns rank -> its position in a group or channel, of the ranks whose status has it."""
    found = {}
    for rank, status in statuses.items():
        if name in status.groups:
            state = status.groups[name]
            waits_in = state.ended + 1 if state.issued > state.ended else None
            found[rank] = Position(state.issued, waits_in, state.still_seconds)
    return found


def find_all_stuck(
    statuses: Mapping[int, RankStatus], members: Mapping[str, Sequence[int]], silent: Sequence[int], seconds: float
) -> list[Stuck]:
    """Returns the groups and channels in which a rank has waited too long, the longest wait first.

    Args:
        statuses: Rank -> its newest status.
        members: Group or channel -> its ranks.
        silent: Ranks whose status is out of date.
        seconds: Wait that is too long.
    """
    unknown = [rank for ranks in members.values() for rank in ranks if rank not in statuses]
    found = []
    for name, ranks in members.items():
        stuck = find_stuck(name, ranks, positions_in(name, statuses), (*silent, *unknown))
        if stuck is not None and stuck.seconds >= seconds:
            found.append(stuck)
    return sorted(found, key=lambda stuck: -stuck.seconds)


@dataclass(frozen=True, slots=True)
class SkippedSend:
    """A message that a rank has left out, while ranks wait for each other.

    Attributes:
        stuck: The channel in which the message is missing.
        line: Line of the training script that sent the earlier ones; None if it is not known.
    """

    stuck: Stuck
    line: str | None


def find_skipped_send(found: Sequence[Stuck], responses: Responses) -> SkippedSend | None:
    """Returns the message that one rank has left out, if ranks wait for each other and exactly one broke its habit.

    Without the message, sender and receiver both wait to receive, and what they wait for does not tell which of the two
    is at fault. But a training script repeats its calls, and the rank that has left one out has a different sequence
    of calls this time.

    Args:
        found: Stuck groups and channels.
        responses: Last collectives and messages of all ranks.
    """
    skipped = []
    for rank in {rank for each in found for rank in each.waiting}:
        calls = [
            (each.began, Issue(name, each.line, sends=sender_of(name) == rank), each.number)
            for name, issued in responses.get(rank, {}).items()
            for each in issued
        ]
        calls.sort(key=lambda call: call[0])
        missing = skipped_send([call for _, call, _ in calls])
        stuck = None if missing is None else next((each for each in found if each.group == missing.group), None)
        if missing is not None and stuck is not None and rank in stuck.missing:
            skipped.append(SkippedSend(stuck, missing.line))
    return skipped[0] if len(skipped) == 1 else None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks of a group that have issued different collectives under the same number.

    Attributes:
        group: Name of the group or channel.
        number: Number of the first collective in which they differ.
        issued: Rank -> the collective that it has issued under this number.
        by_line_alone: True if operations and shapes are the same, and only the lines that issued them differ.
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
    """Returns the first collective of a group in which ranks differ, of those that all ranks with any have sent.

    None if they do not differ, or fewer than two ranks have sent any.

    Args:
        group: Name of the group or channel.
        issued: Rank -> its last collectives, ascending.
        lines: True to compare the lines of the script as well, if operations and shapes are equal. A script may
            issue a collective from different lines without a fault.
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


def find_disagreements(responses: Responses) -> Iterator[Disagreement]:
    """Yields for each group and channel the first collective in which its ranks differ."""
    for name in dict.fromkeys(name for response in responses.values() for name in response):
        issued = {rank: response[name] for rank, response in responses.items() if name in response}
        found = find_disagreement(name, issued, lines=sender_of(name) is None)
        if found is not None:
            yield found


def find_absent(
    responses: Responses,
    statuses: Mapping[int, RankStatus],
    members: Mapping[str, Sequence[int]],
    quiet_seconds: Mapping[int, float],
) -> Iterator[Stuck]:
    """Yields the collectives in which ranks fail because of a lost connection, if other ranks do not respond.

    Args:
        responses: Last collectives and messages of the ranks.
        statuses: Rank -> its newest status.
        members: Group -> its ranks.
        quiet_seconds: Rank -> age of its newest status.
    """
    # Group -> rank that fails -> number of the collective that has failed: the last one that it issued.
    failed: dict[str, dict[int, int]] = {}
    for rank, response in responses.items():
        status = statuses.get(rank)
        if status is not None and status.leaves is not None and any(sign in status.leaves for sign in LOST_CONNECTION):
            last = [(each[-1].began, name) for name, each in response.items() if each and sender_of(name) is None]
            if last:
                name = max(last)[1]
                failed.setdefault(name, {})[rank] = response[name][-1].number
    for name, numbers in failed.items():
        number = max(numbers.values())
        absent = tuple(rank for rank in members.get(name, ()) if rank not in responses)
        # The last status of an absent rank may be older than this collective: it counts as silent, not as missing.
        if absent:
            waiting = tuple(sorted(rank for rank, last in numbers.items() if last == number))
            yield Stuck(name, number, max(quiet_seconds[rank] for rank in absent), waiting, (), absent)


def what_in_words(stuck: Stuck, responses: Responses) -> str:
    """Returns `collective 7 of group default (all_reduce of [10] Float, issued at train.py:3 in step)`.

    What it is and its line are those that most of the waiting ranks give; they are left out if no rank gives them.
    """
    what = one_in_words(stuck.group, stuck.number)
    issued = [
        each
        for rank in stuck.waiting
        for each in responses.get(rank, {}).get(stuck.group, ())
        if each.number == stuck.number
    ]
    if issued:
        (text, line), _ = Counter((str(each), each.line) for each in issued).most_common(1)[0]
        what += f" ({text}" + (f", issued at {line})" if line else ")")
    return what


def stuck_in_words(
    stuck: Stuck, statuses: Mapping[int, RankStatus], responses: Responses, hosts: Mapping[int, str]
) -> str:
    """Returns a sentence about the ranks that have not issued a collective, or not sent or asked for a message.

    The errors with which such ranks end follow it, as far as they have published them.

    Args:
        stuck: The stall.
        statuses: Rank -> its newest status.
        responses: Last collectives and messages of the ranks.
        hosts: Rank -> its host.
    """
    sender = sender_of(stuck.group)
    waits = (
        f"{ranks_in_words(stuck.waiting)} wait{'s' * (len(stuck.waiting) == 1)} {'in' if sender is None else 'for'} it"
    )
    text = stall_in_words(
        stuck,
        what_in_words(stuck, responses),
        hosts,
        {r: str(statuses[r].at) for r in stuck.missing if statuses[r].at and statuses[r].leaves is None},
        absent="reached" if sender is None else "sent" if stuck.missing == (sender,) else "asked for",
        waits=waits if stuck.waiting else None,
    )
    ends = [(rank, "ends") for rank in stuck.missing] + [(rank, "ended") for rank in stuck.silent]
    errors = [
        f"rank {rank} {verb} with {statuses[rank].leaves}"
        for rank, verb in ends[:MOST_RANKS]
        if rank in statuses and statuses[rank].leaves is not None
    ]
    return "; ".join([text, *errors])


def stalls_in_words(
    found: Sequence[Stuck], statuses: Mapping[int, RankStatus], responses: Responses, hosts: Mapping[int, str]
) -> tuple[Stuck, str]:
    """Returns a sentence about the cause of a stall: missing ranks, a send that was left out, or a mutual wait.

    Args:
        found: Stuck groups and channels, the longest wait first; at least one.
        statuses: Rank -> its newest status.
        responses: Last collectives and messages of the ranks.
        hosts: Rank -> its host.

    Returns:
        The group or channel that is the cause, and the sentence.
    """
    cause = origin(found)
    if cause is not None:
        return cause, stuck_in_words(cause, statuses, responses, hosts)
    skipped = find_skipped_send(found, responses)
    if skipped is not None:
        text = stuck_in_words(skipped.stuck, statuses, responses, hosts)
        before = f"; it sent the earlier ones at {skipped.line}" if skipped.line else ""
        return skipped.stuck, text + before
    waits = [f"{ranks_in_words(each.waiting)} in {what_in_words(each, responses)}" for each in found]
    return found[0], f"ranks wait for each other, none of them is late: {'; '.join(waits)}"
