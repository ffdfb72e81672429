"""Writer of the timeline: requests the times of all ranks every ten seconds, and writes them into one file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from gradwire.comms.boundary.files import replace_text
from gradwire.comms.watch.watch_store import WatchStore

log = logging.getLogger("gradwire")

RESPONSE_SECONDS = 3.0
"""Time that all ranks have to respond to a request: six intervals between their statuses."""

TIMELINE_SECONDS = 10.0
"""Interval between two timelines. The file holds the last one. The times of 256 collectives take each rank 8 ms."""


class TimelineWriter:
    """Requests, collects and writes timelines, one step at each call of `go_on`, so that no call waits.

    Args:
        store: Store through which requests and responses are exchanged.
        file: File for the timeline.
    """

    def __init__(self, store: WatchStore, file: Path) -> None:
        self._store = store
        self._file: Path | None = file
        self._request: tuple[int, float] | None = None
        self._next = 0.0

    def begin_soon(self) -> None:
        """Makes the next call of `go_on` request a timeline."""
        self._next = 0.0

    def go_on(self, hosts: Mapping[int, str], now: float) -> None:
        """Requests a timeline if it is time, or writes the requested one once all ranks have responded or time is over.

        After an error of writing, which is logged, no more timelines are requested.

        Args:
            hosts: Rank -> its host.
            now: Monotonic seconds.
        """
        if self._file is None:
            return
        if self._request is None:
            if now >= self._next:
                self._next = now + TIMELINE_SECONDS
                self._request = self._store.request_timelines(), now + RESPONSE_SECONDS
            return
        request, until = self._request
        parts = self._store.timelines(request)
        if len(parts) < self._store.size and now < until:
            return
        self._request = None
        if not parts:
            return
        # Imported here: it needs modules of the hook, which a watch without a timeline does not load.
        from gradwire.comms.watch.timeline import timeline

        try:
            # Replaced as a whole, so that the file is valid whenever the job ends.
            replace_text(self._file, json.dumps(timeline(parts, hosts)), lasting=False)
        except OSError as error:
            log.error("the watch's timeline cannot be written to %s: %s", self._file, error.strerror)
            self._file = None
