"""Sampling of a script's steps on one rank: activities of the main thread, and time with a collective in flight.

Runs in the script's process, in a thread that samples every few milliseconds, as `gradwire.watch()` does.
"""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.files import replace_text
from gradwire.comms.environment import flight_recorder_size, set_flight_recorder_size
from gradwire.comms.watch.activity import Activity
from gradwire.comms.watch.flight import FlightReader
from gradwire.comms.watch.rank import RankLog

POLL_SECONDS = 5e-3
"""Sampling interval, far below the parts of a step that the doctor reports."""
KEPT_COLLECTIVES = 2000
"""Entries of torch's flight recorder, unless the user has set its size."""


class StepSplit:
    """Sampler of this process's main thread and collectives.

    Thread safety: `begin` and `write` are called by the main thread while the sampling thread runs.

    Args:
        file: JSON file that `write` replaces, for the doctor's process.
    """

    def __init__(self, file: Path) -> None:
        if not flight_recorder_size():
            set_flight_recorder_size(KEPT_COLLECTIVES)
        self._file = file
        self._activity = Activity(threading.main_thread().ident or 0)
        self._flight = FlightReader()
        self._log = RankLog()
        self._lock = threading.Lock()  # Guards all that follows, and _activity, _flight and _log.
        self._last = time.monotonic()
        self._first_issued: dict[str, int] = {}
        self._first: tuple[dict[str, float], float] | None = None
        self._closed = threading.Event()
        BackgroundThread(
            "doctor's look at steps",
            self._run,
            without="the script is not said to spend its time on anything",
            on_failure=self._fail,
            end=self.close,
        ).start()

    def _fail(self, error: BaseException) -> None:
        """Stops sampling and writing after an error: samples of a part of the steps would be misleading."""
        self.close()
        with self._lock:
            self._first = None

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if dist.is_initialized():
            self._log.note(now, self._flight.progress())
        if threading.current_thread() is not threading.main_thread():
            self._activity.sample(now - self._last)
            self._last = now

    def close(self) -> None:
        """Tells the sampling thread to end, and does not wait for it; what was counted can still be written."""
        self._closed.set()

    def begin(self) -> None:
        """Starts counting: `write` averages what comes from now on. The main thread calls it at the end of a step."""
        with self._lock:
            if self._closed.is_set():
                return
            self._look()
            self._first = dict(self._activity.seconds), self._under_way()
            self._first_issued = {name: state.issued for name, state in self._log.states()}

    def write(self, steps: int, *, last: bool) -> None:
        """Writes the averages of the steps since `begin` to the file; nothing after an error of the sampling thread.

        Args:
            steps: Number of steps since `begin`, at least 1.
            last: Whether no step follows; only then are all-reduces counted by line, which takes long.
        """
        with self._lock:
            if self._first is None:
                return
            self._look()
            before, waited = self._first
            found = {
                "activity": {
                    kind: (seconds - before.get(kind, 0.0)) / steps for kind, seconds in self._activity.seconds.items()
                },
                "under_way_seconds": (self._under_way() - waited) / steps if self._flight.members else None,
                "lines": self._activity.newest_lines(),
                "all_reduces": {line: count / steps for line, count in (self._all_reduces() if last else {}).items()},
            }
        replace_text(self._file, json.dumps(found), lasting=False)  # read after a kill, too

    def _all_reduces(self) -> Counter[str]:
        """Returns line of the script -> all-reduces since `begin` in groups of all ranks, from the flight recorder."""
        whole = {name for name, ranks in self._flight.members.items() if len(ranks) == dist.get_world_size()}
        return Counter(
            each.line or "?"
            for name, issued in self._flight.issued().items()
            if name in whole
            for each in issued
            if each.number > self._first_issued.get(name, 0) and each.what.startswith("all_reduce")
        )

    def _under_way(self) -> float:
        """Returns the seconds until now in which a collective was in flight, added over the process groups."""
        return sum(state.waited_seconds for _, state in self._log.states())
