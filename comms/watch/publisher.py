"""Publisher of one rank's status, groups and responses in the store that all ranks of a watch share."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence

from gradwire.comms.watch.collective import IssuedCollective, TimelinePart
from gradwire.comms.watch.links import LinkState
from gradwire.comms.watch.rank import GroupState, RankStatus
from gradwire.comms.watch.watch_store import WatchStore

Issued = Callable[[], dict[str, list[IssuedCollective]]]
"""Function that returns group -> its last collectives, as far as this rank knows them."""


class Publisher:
    """Publishes what one rank knows; each request is responded to once.

    Thread safety: none. `Session` calls it under its lock.

    Args:
        store: Store that all ranks of the watch share.
        traces: Whether rank 0 may request parts of a timeline.
    """

    def __init__(self, store: WatchStore, *, traces: bool) -> None:
        self._store = store
        self._traces = traces
        self._beats = self._groups = self._responded = self._timelines = 0

    def publish_groups(self, members: Mapping[str, Sequence[int]]) -> None:
        """Publishes the groups of this rank, if their number has changed since the last call.

        Args:
            members: Group -> its ranks in the default group.
        """
        if len(members) != self._groups:
            self._groups = len(members)
            self._store.publish_groups(members, socket.gethostname())

    def publish(
        self,
        groups: Mapping[str, GroupState],
        activity: Mapping[str, float],
        lines: Mapping[str, str],
        at: str | None,
        leaves: str | None,
        links: Mapping[str, LinkState],
    ) -> None:
        """Publishes a status with the next number and the time; the arguments are those of `RankStatus`."""
        self._beats += 1
        status = RankStatus(self._beats, time.monotonic(), groups, activity, lines, at, leaves, links)
        self._store.publish_status(status)

    def respond(self, issued: Issued, timeline: Issued) -> int:
        """Responds to requests that have come since the last call.

        Args:
            issued: Called for the response to a request for collectives.
            timeline: Called for the response to a request for timelines.

        Returns:
            Number of the newest request for collectives; 0 before the first one.
        """
        request = self._store.newest_request()
        if request > self._responded:
            self._responded = request
            self._store.respond(request, issued())
        if self._traces and (wanted := self._store.newest_timeline_request()) > self._timelines:
            self._timelines = wanted
            self._store.publish_timeline(TimelinePart(wanted, time.time(), timeline()))
        return request
