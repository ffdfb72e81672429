"""Who is late: the rank of a group that waits least in it, and does not wait in another one instead.

A collective ends on all ranks at nearly the same moment, so of two ranks the one that has had something under way for
less time came later. That is summed over slices of at least `SLICE_SECONDS`, between moments that are the same for all
ranks: a group has nothing under way, and the same number of collectives has ended.

**When a rank is named.** In all of the last `STRONG_SLICES` slices it waited less than the median rank by more than
`STRONG_SHARE` of the slice, and by `STRONG_SECONDS`; or in all but one of the last `SLICES` by more than `SHARE`, and
by `FLOOR_SECONDS`. Let p be the chance that one rank of a healthy group is behind by so much in a slice: then the
second rule names it by chance with less than 12 p^11, which is 1e-10 at p = 0.1, and the first with p^4, where p is
tiny. Where a job ends before there are so many slices, a rank that was behind in all of them, `STRONG_SLICES` at least,
is a suspect: p^4 is 1e-4 then, too much to name it while there is more to come.

**Late or made late.** With several groups (tensor and data parallel ranks, stages) whoever waits for a late rank in one
group comes late to the next. So a rank that is behind in a group is not named where it has waited in another one, more
than the rank that waited least there, for at least `MADE_LATE` of what it is behind, in the same time: that one is
looked at instead. Nor is it named before all of another group have said how long they waited in that time.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.comms.watch.activity import QUEUE
from gradwire.comms.watch.collective import IssuedCollective
from gradwire.comms.watch.rank import QuietPoint, RankStatus

SLICE_SECONDS = 0.5
SLICES, STRONG_SLICES = 12, 4
FLOOR_SECONDS, SHARE = 10e-3, 0.05
STRONG_SECONDS, STRONG_SHARE = 0.05, 0.25
MADE_LATE = 1 / 3
LONGEST_SECONDS = 60.0
"""Seconds that points are kept: what is older is forgotten."""

UNLIKE_SHARE = 0.05
"""What a late rank is said to be late in takes so much more of its time than of the median rank's."""

QUEUE_SHARE = 0.5
"""Share of a late rank's extra time: where it waits for a processor for so much of that, it is this that makes it late,
whatever it was about to do."""


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that others wait for.

    Attributes:
        rank: In the default group.
        group: Where they wait.
        seconds: How much less than the median rank it waits there in a second.
        waiting: The other ranks of that group.
        busy_with: What it does so much longer than the others; None where its main thread does the same as theirs.
        line: Where it does that.
    """

    rank: int
    group: str
    seconds: float
    waiting: tuple[int, ...]
    busy_with: str | None = None
    line: str | None = None


def longest_waited_in(
    issued: Mapping[int, Sequence[IssuedCollective]], ranks: Sequence[int]
) -> IssuedCollective | None:
    """The collective in which these ranks have stood longest, of those that a group issues again and again.

    Args:
        issued: Rank -> its last collectives of one group. Those that carry the same, for the same line, are one.
        ranks: Those that wait.

    Returns:
        One of them, without its number and times; None where none has ended.
    """
    seconds: dict[IssuedCollective, float] = defaultdict(float)
    for rank in ranks:
        for each in issued.get(rank, ()):
            if each.ended is not None:
                seconds[replace(each, number=0, began=0.0, ended=None)] += each.ended - each.began
    return max(seconds, key=seconds.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class _Slice:
    """The time between two moments of a group's life.

    Attributes:
        seconds: How long it took.
        ends: When it ended, by each rank's own clock.
        waited: For how long each rank had something under way in it.
    """

    seconds: float
    ends: tuple[float, ...]
    waited: tuple[float, ...]

    def overlap(self, place: int, since: float, until: float) -> float:
        """The share of it that lies between two moments of a rank's clock."""
        end = self.ends[place]
        return max(min(end, until) - max(end - self.seconds, since), 0.0) / self.seconds

    def behind(self) -> list[float]:
        """How much less each rank waited than the median one; of two in the middle the one that waits more."""
        middle = sorted(self.waited)[len(self.waited) // 2]
        return [middle - each for each in self.waited]


class GroupWaits:
    """The last slices of one group.

    Args:
        ranks: Of the group, in the default group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._points: list[dict[int, QuietPoint]] = [{} for _ in ranks]
        self._slices: deque[_Slice] = deque(maxlen=2 * SLICES)  # those of another group may be twice as long
        self._from = -1

    def add(self, rank: int, quiet: Sequence[QuietPoint]) -> None:
        """Takes in what a rank says.

        Args:
            rank: In the default group.
            quiet: Its last quiet points.
        """
        known = self._points[self.ranks.index(rank)]
        known.update((point.number, point) for point in quiet if point.number >= self._from)
        newest = max((point.seconds for point in known.values()), default=0.0)
        for number in [number for number, point in known.items() if point.seconds < newest - LONGEST_SECONDS]:
            del known[number]

    def cut(self) -> None:
        """Makes slices of what all ranks have said."""
        common = sorted(set.intersection(*(set(points) for points in self._points)))
        if not common:
            return
        first = common[0]
        for number in common[1:]:
            begin, end = ([points[each] for points in self._points] for each in (first, number))
            seconds = end[0].seconds - begin[0].seconds
            if seconds >= SLICE_SECONDS:
                waited = tuple(b.waited_seconds - a.waited_seconds for a, b in zip(begin, end, strict=True))
                self._slices.append(_Slice(seconds, tuple(point.seconds for point in end), waited))
                first = number
        self._from = first
        for points in self._points:
            for number in [number for number in points if number < first]:
                del points[number]

    @property
    def decided(self) -> bool:
        """Whether there are slices enough to name whoever is late."""
        return len(self._slices) >= SLICES

    def behind(self, *, suspected: bool = False) -> dict[int, tuple[float, float, float]]:
        """Ranks that are late here -> seconds in a second; from when, and to when, by the rank's own clock.

        Args:
            suspected: Those, too, that would be if all slices to come were like those that there are.
        """
        few = len(self._slices)
        guessed = suspected and STRONG_SLICES <= few < SLICES
        found = {}
        for place, rank in enumerate(self.ranks):
            strong = self._is_late(place, STRONG_SLICES, STRONG_SHARE, STRONG_SECONDS, 0)
            weak = guessed and self._is_late(place, few, SHARE, FLOOR_SECONDS, 0)
            if strong or weak or self._is_late(place, SLICES, SHARE, FLOOR_SECONDS, 1):
                last = list(self._slices)[-(STRONG_SLICES if strong else SLICES) :]
                share = sum(each.behind()[place] for each in last) / sum(each.seconds for each in last)
                found[rank] = share, last[0].ends[place] - last[0].seconds, last[-1].ends[place]
        return found

    def _is_late(self, place: int, slices: int, share: float, floor: float, strays: int) -> bool:
        last = list(self._slices)[-slices:]
        late = sum(each.behind()[place] > max(floor, share * each.seconds) for each in last)
        return len(last) == slices and late >= slices - strays

    def waits_for_others(self, rank: int, since: float, until: float) -> float | None:
        """The seconds that a rank has waited longer than the one that waits least.

        Args:
            rank: In the default group.
            since: By its own clock.
            until: By its own clock.

        Returns:
            None where this rank has gone on in the group, and others have not said yet how they have.
        """
        place = self.ranks.index(rank)
        known = self._slices[-1].ends[place] if self._slices else since
        newest = max((point.seconds for point in self._points[place].values()), default=known)
        if known < until and newest - known >= SLICE_SECONDS:
            return None
        return sum((each.waited[place] - min(each.waited)) * each.overlap(place, since, until) for each in self._slices)


class Lateness:
    """Judges from the statuses of all ranks who is late.

    Args:
        members: Group's name -> its ranks in the default group.
    """

    def __init__(self, members: Mapping[str, Sequence[int]]) -> None:
        self._groups = {name: GroupWaits(ranks) for name, ranks in members.items() if len(ranks) > 1}
        self._activity: deque[dict[int, tuple[float, Mapping[str, float]]]] = deque(maxlen=SLICES)
        self._named: set[int] = set()

    def receive(self, statuses: Mapping[int, RankStatus]) -> list[LateRank]:
        """Takes in statuses.

        Args:
            statuses: Of all ranks, newest.

        Returns:
            The ranks that are late now, the latest first.
        """
        for name, group in self._groups.items():
            for rank in group.ranks:
                if rank in statuses and name in statuses[rank].groups:
                    group.add(rank, statuses[rank].groups[name].quiet)
            group.cut()
        self._activity.append({rank: (status.seconds, status.activity) for rank, status in statuses.items()})
        found = self._found(statuses)
        self._named = {each.rank for each in found}
        return found

    @property
    def decided(self) -> bool:
        """Whether any group has gone on for long enough that a late rank would have been named."""
        return any(group.decided for group in self._groups.values())

    def suspects(self, statuses: Mapping[int, RankStatus]) -> list[LateRank]:
        """The ranks that were late in all that there was to see, where that is too little to name them.

        Args:
            statuses: As `hear` has had them last.
        """
        return [each for each in self._found(statuses, suspected=True) if each.rank not in self._named]

    def _found(self, statuses: Mapping[int, RankStatus], *, suspected: bool = False) -> list[LateRank]:
        behind = [
            (seconds, since, until, rank, name)
            for name, group in self._groups.items()
            for rank, (seconds, since, until) in group.behind(suspected=suspected).items()
        ]
        found: dict[int, LateRank] = {}
        for seconds, since, until, rank, name in sorted(behind, reverse=True):
            if rank in found or self._made_late(rank, name, seconds * (until - since), since, until):
                continue
            kind = self._unlike(rank, self._groups[name].ranks)
            line = statuses[rank].lines.get(kind) if kind is not None else None
            waiting = tuple(each for each in self._groups[name].ranks if each != rank)
            found[rank] = LateRank(rank, name, seconds, waiting, kind, line)
        return list(found.values())

    def _made_late(self, rank: int, name: str, seconds: float, since: float, until: float) -> bool:
        """Whether a rank is late because it waits for another one, or may be as far as is known yet."""
        others = (group for other, group in self._groups.items() if other != name and rank in group.ranks)
        waits = [group.waits_for_others(rank, since, until) for group in others]
        return any(rank not in self._named if each is None else each >= seconds * MADE_LATE for each in waits)

    def _unlike(self, rank: int, ranks: Sequence[int]) -> str | None:
        """What a rank does for longer than the median rank of its group, of what is not waiting for others."""
        shares = {each: self._shares(each) for each in ranks}
        kinds = {kind for share in shares.values() for kind in share}
        excess = {
            kind: shares[rank].get(kind, 0.0)
            - statistics.median(shares[each].get(kind, 0.0) for each in ranks if each != rank)
            for kind in kinds
        }
        queue = excess.pop(QUEUE, 0.0)
        kind = max(excess, key=excess.__getitem__, default=None)
        if queue > max(UNLIKE_SHARE, QUEUE_SHARE * (excess[kind] if kind is not None else 0.0)):
            return QUEUE
        return kind if kind is not None and excess[kind] > UNLIKE_SHARE else None

    def _shares(self, rank: int) -> dict[str, float]:
        """What a rank has done since the first status that is kept -> share of the time."""
        said = [statuses[rank] for statuses in self._activity if rank in statuses]
        (before, was), (now, is_now) = said[0], said[-1]
        if now <= before:
            return {}
        return {kind: (seconds - was.get(kind, 0.0)) / (now - before) for kind, seconds in is_now.items()}
