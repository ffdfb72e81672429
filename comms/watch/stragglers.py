"""Straggler detection of the watch: names the rank of a group that waits least in it, unless it waits in another one.

A collective ends on all ranks at nearly the same moment. So of two ranks, the one that had collectives in flight for
less time arrived later. The difference is summed over slices of at least `SLICE_SECONDS`, between moments that are the
same for all ranks: see `EndPoint`. The comparison with the median rank is that of `comms/observe/diagnosis.py`.

**When a rank is named.** In all of the last `STRONG_SLICES` slices it waited less than the median rank by more than the
margin `STRONG`; or in all but one of the last `SLICES` by more than `WEAK`. If p is the chance that one rank of a
healthy group is behind by so much in a slice, the second rule names it by chance with less than 12 p^11, which is 1e-10
at p = 0.1, and the first with p^4, where p is tiny. If a job ends before there are so many slices, a rank that was
behind in all of them, at least `STRONG_SLICES`, is a suspect: p^4 is 1e-4 then, too much to name it in a longer job.

**Delayed ranks.** With several groups (tensor and data parallel ranks, pipeline stages), a rank that waits for a
straggler in one group is late in the next one. So a rank that is behind in a group is not named if, in the same time,
it has waited in another group longer than the rank that waited least there, by at least `MADE_LATE` of its delay. Nor
is it named before all ranks of that group have published their waits for that time.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.comms.observe.diagnosis import STRONG, Margin, behind_median, excesses, is_behind
from gradwire.comms.watch.activity import QUEUE
from gradwire.comms.watch.collective import IssuedCollective
from gradwire.comms.watch.rank import EndPoint, RankStatus

SLICE_SECONDS = 0.5
"""Least length of a slice: 25 polls, so that the poll interval is a small part of it."""
BUSY_SLICE_SECONDS = 2 * SLICE_SECONDS
"""Least length of a slice whose end is not quiet on all ranks: it is used if no quiet one comes earlier."""
SLICES, STRONG_SLICES = 12, 4
"""Slices of the two rules in the module's header."""
WEAK = Margin(10e-3, 0.05)
"""Margin of the slow rule. Less than a twentieth of the time is not worth a warning."""
MADE_LATE = 1 / 3
"""Part of a rank's delay that it must have waited in another group to count as delayed by that one."""
LONGEST_SECONDS = 60.0
"""Age after which points of a rank are forgotten, if the other ranks have none of the same moment."""

UNLIKE_SHARE = 0.05
"""Least share of its time that a straggler spends longer on an activity than the median rank, to be given as cause."""

QUEUE_SHARE = 0.5
"""Least share of that extra time for which it waited for a processor, to give this as cause, whatever it was doing."""


@dataclass(frozen=True, slots=True)
class WatchStraggler:
    """A rank for which others wait.

    Attributes:
        rank: Rank in the default group.
        group: Group in which they wait.
        seconds: Time by which it waits less there than the median rank, in seconds per second.
        waiting: The other ranks of that group.
        busy_with: Activity that it does for so much longer than the others; None if its main thread does the same.
        line: Line of the training script in which it does that; None if it is not known.
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
    """Returns the collective in which ranks have waited longest, of those that a group issues again and again.

    Args:
        issued: Rank -> its last collectives of one group. Those with the same contents and line count as one.
        ranks: Ranks that wait.

    Returns:
        One of them, without its number and times; None if none has ended.
    """
    seconds: dict[IssuedCollective, float] = defaultdict(float)
    for rank in ranks:
        for each in issued.get(rank, ()):
            if each.ended is not None:
                seconds[replace(each, number=0, began=0.0, ended=None)] += each.ended - each.began
    return max(seconds, key=seconds.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Time between two moments that all ranks of a group know.

    Attributes:
        seconds: Length of the slice.
        ends: End of the slice by each rank's own clock, in the order of the group's ranks.
        waited: Seconds of the slice for which each rank had a collective in flight.
    """

    seconds: float
    ends: tuple[float, ...]
    waited: tuple[float, ...]

    def overlap(self, place: int, since: float, until: float) -> float:
        """Returns the share of the slice that is between two moments of a rank's clock.

        Args:
            place: Index of the rank in the group.
            since: Earlier moment, in seconds.
            until: Later moment, in seconds.
        """
        end = self.ends[place]
        return max(min(end, until) - max(end - self.seconds, since), 0.0) / self.seconds


class GroupWaits:
    """Sums the waits of a group's ranks over slices of time.

    A slice begins and ends with a collective whose end all ranks have published.

    Args:
        ranks: Ranks of the group, in the default group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._points: list[dict[int, EndPoint]] = [{} for _ in ranks]
        self._slices: deque[_Slice] = deque(maxlen=2 * SLICES)  # those of another group may be twice as long
        self._from = -1

    def add(self, rank: int, ends: Sequence[EndPoint]) -> None:
        """Adds the end points of a rank's status, of which the previous status may have had some already.

        Args:
            rank: Rank in the default group.
            ends: End points in the status, ascending.
        """
        known = self._points[self.ranks.index(rank)]
        known.update((point.number, point) for point in ends if point.number >= self._from)
        newest = max((point.seconds for point in known.values()), default=0.0)
        for number in [number for number, point in known.items() if point.seconds < newest - LONGEST_SECONDS]:
            del known[number]

    def cut(self) -> None:
        """Cuts the time into slices at the end points that all ranks have published."""
        common = sorted(set.intersection(*(set(points) for points in self._points)))
        if not common:
            return
        first = common[0]
        for number in common[1:]:
            begin, end = ([points[each] for points in self._points] for each in (first, number))
            seconds = end[0].seconds - begin[0].seconds
            quiet = all(point.quiet for point in end)
            if seconds >= (SLICE_SECONDS if quiet else BUSY_SLICE_SECONDS):
                waited = tuple(b.waited_seconds - a.waited_seconds for a, b in zip(begin, end, strict=True))
                self._slices.append(_Slice(seconds, tuple(point.seconds for point in end), waited))
                first = number
        self._from = first
        for points in self._points:
            for number in [number for number in points if number < first]:
                del points[number]

    @property
    def decided(self) -> bool:
        """True if there are enough slices to name a straggler."""
        return len(self._slices) >= SLICES

    def behind(self, *, suspected: bool = False) -> dict[int, tuple[float, float, float]]:
        """Returns the ranks that come late to this group's collectives: they wait in them less than the median rank.

        Args:
            suspected: True to include ranks that were late in every slice so far, of which there are at least
                `STRONG_SLICES` but too few to name the rank.

        Returns:
            Rank -> (seconds by which it waits less than the median rank, per second; begin and end of the slices that
            show it, in seconds by the rank's own clock).
        """
        few = len(self._slices)
        guessed = suspected and STRONG_SLICES <= few < SLICES
        found = {}
        for place, rank in enumerate(self.ranks):
            strong = self._is_late(place, STRONG_SLICES, STRONG, 0)
            weak = guessed and self._is_late(place, few, WEAK, 0)
            if strong or weak or self._is_late(place, SLICES, WEAK, 1):
                last = list(self._slices)[-(STRONG_SLICES if strong else SLICES) :]
                share = sum(behind_median(each.waited)[place] for each in last) / sum(each.seconds for each in last)
                found[rank] = share, last[0].ends[place] - last[0].seconds, last[-1].ends[place]
        return found

    def _is_late(self, place: int, slices: int, margin: Margin, exceptions: int) -> bool:
        """Returns whether a rank is behind in the last slices; False if there are too few of them.

        Args:
            place: Index of the rank in the group.
            slices: Number of the last slices that are examined.
            margin: Delay above which a rank is behind in a slice.
            exceptions: Number of these slices in which it need not be behind.
        """
        last = list(self._slices)[-slices:]
        delays = [behind_median(each.waited)[place] for each in last]
        return len(last) == slices and is_behind(delays, [each.seconds for each in last], margin, exceptions=exceptions)

    def waits_for_others(self, rank: int, since: float, until: float) -> float | None:
        """Returns how many seconds longer a rank has waited in this group than the rank that waited least.

        Args:
            rank: Rank in the default group.
            since: Begin of the time that counts, by the rank's own clock.
            until: End of that time, by the rank's own clock.

        Returns:
            The seconds; None if they are not known yet, because other ranks have not published their waits.
        """
        place = self.ranks.index(rank)
        known = self._slices[-1].ends[place] if self._slices else since
        newest = max((point.seconds for point in self._points[place].values()), default=known)
        if known < until and newest - known >= SLICE_SECONDS:
            return None
        return sum((each.waited[place] - min(each.waited)) * each.overlap(place, since, until) for each in self._slices)


class StragglerFinder:
    """Finds the stragglers of a job from the statuses of all ranks.

    Args:
        members: Group -> its ranks in the default group.
    """

    def __init__(self, members: Mapping[str, Sequence[int]]) -> None:
        self._groups = {name: GroupWaits(ranks) for name, ranks in members.items() if len(ranks) > 1}
        self._activity: deque[dict[int, tuple[float, Mapping[str, float]]]] = deque(maxlen=SLICES)
        self._named: set[int] = set()

    def receive(self, statuses: Mapping[int, RankStatus]) -> list[WatchStraggler]:
        """Adds the newest statuses, cuts the time into slices, and names stragglers.

        Args:
            statuses: Rank -> its newest status.

        Returns:
            The stragglers as of now, the one with the longest delay first.
        """
        for name, group in self._groups.items():
            for rank in group.ranks:
                if rank in statuses and name in statuses[rank].groups:
                    group.add(rank, statuses[rank].groups[name].ends)
            group.cut()
        self._activity.append({rank: (status.seconds, status.activity) for rank, status in statuses.items()})
        found = self._found(statuses)
        self._named = {each.rank for each in found}
        return found

    @property
    def decided(self) -> bool:
        """True if a straggler would have been named in some group, because it has been seen for long enough."""
        return any(group.decided for group in self._groups.values())

    def suspects(self, statuses: Mapping[int, RankStatus]) -> list[WatchStraggler]:
        """Returns ranks that were behind in all slices, of which there are too few to name them.

        Args:
            statuses: Statuses of the last call of `receive`.
        """
        return [each for each in self._found(statuses, suspected=True) if each.rank not in self._named]

    def _found(self, statuses: Mapping[int, RankStatus], *, suspected: bool = False) -> list[WatchStraggler]:
        """Returns the ranks that are behind in a group and are not delayed by another one, the longest delay first.

        Args:
            statuses: Rank -> its newest status.
            suspected: True to include suspects; see `GroupWaits.behind`.
        """
        behind = [
            (seconds, since, until, rank, name)
            for name, group in self._groups.items()
            for rank, (seconds, since, until) in group.behind(suspected=suspected).items()
        ]
        found: dict[int, WatchStraggler] = {}
        for seconds, since, until, rank, name in sorted(behind, reverse=True):
            if rank in found or self._made_late(rank, name, seconds * (until - since), since, until):
                continue
            kind = self._unlike(rank, self._groups[name].ranks)
            line = statuses[rank].lines.get(kind) if kind is not None else None
            waiting = tuple(each for each in self._groups[name].ranks if each != rank)
            found[rank] = WatchStraggler(rank, name, seconds, waiting, kind, line)
        return list(found.values())

    def _made_late(self, rank: int, name: str, seconds: float, since: float, until: float) -> bool:
        """Returns whether a rank is late in a group because it waits in another one.

        If the waits of another group are not known yet, the answer is True for a rank that was not named before.

        Args:
            rank: Rank in the default group.
            name: Group in which it is late.
            seconds: Delay there.
            since: Begin of the time that counts, by the rank's own clock.
            until: End of that time.
        """
        others = (group for other, group in self._groups.items() if other != name and rank in group.ranks)
        waits = [group.waits_for_others(rank, since, until) for group in others]
        return any(rank not in self._named if each is None else each >= seconds * MADE_LATE for each in waits)

    def _unlike(self, rank: int, ranks: Sequence[int]) -> str | None:
        """Returns the activity on which a rank spends more time than the median rank of its group; None without one."""
        excess = excesses({each: self._shares(each) for each in ranks}, rank)
        queue = excess.pop(QUEUE, 0.0)
        kind = max(excess, key=excess.__getitem__, default=None)
        if queue > max(UNLIKE_SHARE, QUEUE_SHARE * (excess[kind] if kind is not None else 0.0)):
            return QUEUE
        return kind if kind is not None and excess[kind] > UNLIKE_SHARE else None

    def _shares(self, rank: int) -> dict[str, float]:
        """Returns activity -> share of a rank's time since the first status that is kept."""
        kept = [statuses[rank] for statuses in self._activity if rank in statuses]
        (before, was), (now, is_now) = kept[0], kept[-1]
        if now <= before:
            return {}
        return {kind: (seconds - was.get(kind, 0.0)) / (now - before) for kind, seconds in is_now.items()}
