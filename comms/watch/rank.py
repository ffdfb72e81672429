"""What one rank notes of itself, and says to the rank that judges."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradwire.comms.watch.flight import Progress
from gradwire.comms.watch.links import LINKS_SECONDS, LinkState, connection_states

QUIET_POINTS = 128
"""Most quiet points of a group that a rank says at a time; each status repeats the one before, so one may be missed."""


@dataclass(frozen=True, slots=True)
class QuietPoint:
    """A moment in which a group had nothing under way on one rank.

    Attributes:
        number: Of the last collective, which had ended; the same moment of the job on every rank.
        waited_seconds: For how long the group had something under way until then, all in all.
        seconds: When it was, by this rank's clock.
    """

    number: int
    waited_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupState:
    """What a rank says of one group.

    Attributes:
        issued: Collectives issued.
        ended: Of these ended.
        still_seconds: For how long nothing has moved though something is under way.
        waited_seconds: As in `QuietPoint`, until now.
        quiet: Its last quiet points, ascending.
    """

    issued: int
    ended: int
    still_seconds: float
    waited_seconds: float
    quiet: tuple[QuietPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank says now and then.

    Attributes:
        beat: Counts its statuses; a rank whose beat stands still is frozen, or lost.
        seconds: Its clock.
        groups: Name -> state.
        activity: What its main thread does -> seconds so far.
        lines: What its main thread does -> the line where it does that most.
        at: The line where it is.
        leaves: It is about to end with this error; None while it runs.
        links: What its connections with other hosts have sent: `own address>peer's` -> state.
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
    progress: Progress
    moved: float
    waited: float = 0.0
    quiet: deque[QuietPoint] = field(default_factory=lambda: deque(maxlen=QUIET_POINTS))


class RankLog:
    """Notes how long each group has something under way on this rank.

    Two ranks of a group end a collective at nearly the same moment; so the one whose time under way grows less has come
    later, by the difference, whatever their clocks say.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._last: float | None = None
        self._links: Mapping[str, LinkState] = {}
        self._next_links = 0.0

    @property
    def waits(self) -> bool:
        """Whether any group had something under way at the last look."""
        return any(group.progress.waits for group in self._groups.values())

    def note(self, seconds: float, progress: Mapping[str, Progress]) -> None:
        """Takes in one look.

        Args:
            seconds: When it was taken.
            progress: Group's name -> how far it was.
        """
        passed = 0.0 if self._last is None else seconds - self._last
        self._last = seconds
        for name, now in progress.items():
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = _Group(now, seconds)
            elif group.progress.waits:
                group.waited += passed
            if now != group.progress:
                group.progress, group.moved = now, seconds
            if not now.waits and (not group.quiet or group.quiet[-1].number != now.ended):
                group.quiet.append(QuietPoint(now.ended, round(group.waited, 4), round(seconds, 4)))

    def links(self, seconds: float) -> Mapping[str, LinkState]:
        """What this process's connections with other hosts have sent, as of the last second.

        Args:
            seconds: Now.
        """
        if seconds >= self._next_links:
            self._next_links = seconds + LINKS_SECONDS
            self._links = connection_states()
        return self._links

    def states(self) -> Iterator[tuple[str, GroupState]]:
        """Yields (name, state) for each group, as of the last look."""
        for name, group in self._groups.items():
            now, last = group.progress, self._last or 0.0
            still = last - group.moved if now.waits else 0.0
            yield name, GroupState(now.issued, now.ended, still, group.waited, tuple(group.quiet))
