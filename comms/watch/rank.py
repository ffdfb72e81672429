"""Record of one rank: how long each of its groups had collectives in flight, and the status that it publishes."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradwire.comms.watch.flight import Progress
from gradwire.comms.watch.links import LINKS_SECONDS, LinkState, connection_states

END_POINTS = 128
"""Most end points of a group in a status. They cover several statuses, so that one may be missed."""


@dataclass(frozen=True, slots=True)
class EndPoint:
    """A moment of a group that is the same on all of its ranks: the collective with this number has ended.

    Attributes:
        number: Number of the collective that has ended.
        waited_seconds: Time for which the group had something in flight until then, since the watch began.
        seconds: Time of the poll that saw the end, by this rank's monotonic clock.
        quiet: True if nothing was in flight. Then `waited_seconds` is exact; otherwise it is too long by the time
            from the end to the poll, one interval between polls at most.
    """

    number: int
    waited_seconds: float
    seconds: float
    quiet: bool = True


@dataclass(frozen=True, slots=True)
class GroupState:
    """State of one group, or channel of messages, on one rank.

    Attributes:
        issued: Number of the last collective that was issued.
        ended: Number of the last collective up to which all have ended.
        still_seconds: Time without progress while something is in flight; 0 otherwise.
        waited_seconds: Time for which something was in flight until now, as in `EndPoint`.
        ends: Last end points, ascending.
    """

    issued: int
    ended: int
    still_seconds: float
    waited_seconds: float
    ends: tuple[EndPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status that a rank publishes.

    Attributes:
        beat: Number of the status. If it stays the same, the rank is frozen or has failed.
        seconds: Time by the rank's monotonic clock.
        groups: Group or channel -> its state.
        activity: Activity of the main thread -> seconds so far.
        lines: Activity -> line of the training script in which it was seen most often since the previous status.
        at: Line in which the main thread is; None if it is not known.
        leaves: Error with which the rank is about to end; None while it runs.
        links: `own address>peer's` -> what the connections with that host have sent.
    """

    beat: int
    seconds: float
    groups: Mapping[str, GroupState]
    activity: Mapping[str, float]
    lines: Mapping[str, str]
    at: str | None = None
    leaves: str | None = None
    links: Mapping[str, LinkState] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """Record of one group.

    Attributes:
        progress: Progress at the last poll.
        moved: Time of the last change of the progress.
        waited: Seconds for which something was in flight.
        ends: Last end points.
    """

    progress: Progress
    moved: float
    waited: float = 0.0
    ends: deque[EndPoint] = field(default_factory=lambda: deque(maxlen=END_POINTS))


class RankLog:
    """Records how long each group has something in flight on this rank.

    Two ranks of a group end a collective at nearly the same moment. So the one whose time in flight grows less has
    arrived later, by the difference, whatever their clocks show.

    Thread safety: `note` is called by the polling thread, the others under the lock of `Session`.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._last: float | None = None
        self._links: Mapping[str, LinkState] = {}
        self._next_links = 0.0

    @property
    def waits(self) -> bool:
        """True if any group had something in flight at the last poll."""
        return any(group.progress.waits for group in self._groups.values())

    def note(self, seconds: float, progress: Mapping[str, Progress]) -> None:
        """Records one poll.

        Args:
            seconds: Time of the poll.
            progress: Group -> its progress.
        """
        passed = 0.0 if self._last is None else seconds - self._last
        self._last = seconds
        for name, now in progress.items():
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = _Group(now, seconds)
            elif group.progress.waits:
                group.waited += passed
            ended = now.ended != group.progress.ended
            if now != group.progress:
                group.progress, group.moved = now, seconds
            if (ended or not now.waits) and (not group.ends or group.ends[-1].number != now.ended):
                point = EndPoint(now.ended, round(group.waited, 4), round(seconds, 4), not now.waits)
                group.ends.append(point)

    def links(self, seconds: float) -> Mapping[str, LinkState]:
        """Returns what this process's connections with other hosts have sent: `connection_states`, up to a second old.

        Args:
            seconds: Present time.
        """
        if seconds >= self._next_links:
            self._next_links = seconds + LINKS_SECONDS
            self._links = connection_states()
        return self._links

    def states(self) -> Iterator[tuple[str, GroupState]]:
        """Yields (group, its state at the last poll)."""
        for name, group in self._groups.items():
            now, last = group.progress, self._last or 0.0
            still = last - group.moved if now.waits else 0.0
            yield name, GroupState(now.issued, now.ended, still, group.waited, tuple(group.ends))
