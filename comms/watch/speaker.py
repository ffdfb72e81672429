"""What one rank leaves on the store: its statuses as they come, and what all are asked for, once for each question."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence

from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.links import LinkState
from gradwire.comms.watch.rank import GroupState, RankStatus
from gradwire.comms.watch.watch_store import WatchStore

Issued = Callable[[], dict[str, list[IssuedCollective]]]
"""Group -> its collectives, as far as they are known."""


class Speaker:
    """One rank's voice.

    Args:
        store: Where all read it.
        traces: Parts of the timeline may be asked for.
    """

    def __init__(self, store: WatchStore, *, traces: bool) -> None:
        self._store = store
        self._traces = traces
        self._beats = self._groups = self._answered = self._timelines = 0

    def introduce(self, members: Mapping[str, Sequence[int]]) -> None:
        """Says which groups this rank is in, where there are others than it has said.

        Args:
            members: Group -> its ranks.
        """
        if len(members) != self._groups:
            self._groups = len(members)
            self._store.introduce(members, socket.gethostname())

    def say(
        self,
        groups: Mapping[str, GroupState],
        activity: Mapping[str, float],
        lines: Mapping[str, str],
        at: str | None,
        leaves: str | None,
        links: Mapping[str, LinkState],
    ) -> None:
        """Leaves a status, with its number and the time; see `RankStatus`."""
        self._beats += 1
        self._store.say(RankStatus(self._beats, time.monotonic(), groups, activity, lines, at, leaves, links))

    def answer(self, issued: Issued, timeline: Issued) -> int:
        """Answers what has been asked since.

        Args:
            issued: What is left where it is asked for the last collectives.
            timeline: What is left for the timeline.

        Returns:
            The number of the question that is open; 0 without one.
        """
        question = self._store.asked()
        if question > self._answered:
            self._answered = question
            self._store.answer(question, issued())
        if self._traces and (asked := self._store.timelines_asked()) > self._timelines:
            self._timelines = asked
            self._store.leave_timeline(TimelinePart(asked, time.time(), timeline()))
        return question
