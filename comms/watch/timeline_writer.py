"""The timeline of all groups, asked of all ranks now and then, and written into one file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from gradwire.comms.boundary.files import replace_text
from gradwire.comms.watch.watch_store import WatchStore

log = logging.getLogger("gradwire")

RESPONSE_SECONDS = 3.0
"""How long all ranks have to response a request."""

TIMELINE_SECONDS = 10.0
"""Seconds between two timelines: the file holds the last one. The times of 256 collectives take each rank some 8 ms."""


class TimelineWriter:
    """Asks, collects and writes, a little at each call.

    Args:
        store: Where questions and responses are.
        file: For the timeline.
    """

    def __init__(self, store: WatchStore, file: Path) -> None:
        self._store = store
        self._file: Path | None = file
        self._request: tuple[int, float] | None = None
        self._next = 0.0

    def begin_soon(self) -> None:
        """Asks at the next call."""
        self._next = 0.0

    def go_on(self, hosts: Mapping[int, str], now: float) -> None:
        """Asks where it is time, or writes what has come.

        Args:
            hosts: Rank -> host.
            now: Seconds of the monotonic clock.
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
        from gradwire.comms.watch.timeline import timeline  # and with it what the hook needs

        try:
            replace_text(self._file, json.dumps(timeline(parts, hosts)), lasting=False)  # whole, whenever the job ends
        except OSError as error:
            log.error("the watch's timeline cannot be written to %s: %s", self._file, error.strerror)
            self._file = None
