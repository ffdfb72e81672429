"""`gradwire.watch()` and GRADWIRE_WATCH=1: the watch of one process, from its start to its report.

A thread waits for a default group, watches it in a `Session` for as long as it exists, and then waits for the next one.
Nothing that is computed changes: the thread reads torch's flight recorder, and point-to-point messages are noted when
they are issued.
"""

import atexit
import logging
import math
import sys
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.comms.bootstrap.threads import BackgroundThread, in_thread, outcome_of
from gradwire.comms.boundary.files import replace_text
from gradwire.comms.environment import (
    FLIGHT_RECORDER_SIZE,
    WATCH,
    flight_recorder_size,
    set_flight_recorder_size,
    watch_options,
)
from gradwire.comms.watch.messages import MessageNotes
from gradwire.comms.watch.signals import END, HELD_ABORT, REPORT, Signals

if TYPE_CHECKING:
    from gradwire.comms.observe.metrics import Metrics
    from gradwire.comms.watch.report import WatchReport
    from gradwire.comms.watch.session import Session

log = logging.getLogger("gradwire")

KEPT = 256
"""Collectives of each rank that torch's flight recorder keeps, if its variable is not set: those that ranks compare
when one of them hangs. Reading them with their lines takes 0.1 s, once for each request."""

IDLE_SECONDS = 0.2
"""Interval between two checks for a default group, while there is none."""
METRICS_EVERY_SECONDS = 5.0
"""Interval between two exports of metrics."""

_watch: "Watch | None" = None
"""The watch of this process."""


class Watch:
    """Watch of this process, which begins at once.

    It wraps torch's methods for messages, sets `sys.excepthook` and, if the program does not, the handlers of
    `signals.Signals`, starts a background thread that watches, and has Python call `close` at exit.

    Thread safety: `report` may be read from any thread; `close` is for the main thread.

    Args:
        stall_seconds: Time without progress of a group until a stall is logged.
        json: File for the report, written by rank 0 at the end; None writes none.
        metrics: File for node_exporter's textfile collector, or port of this host, for rank 0; None exports none.
        trace: File for the timeline, written by rank 0 every ten seconds; None writes none.
    """

    def __init__(self, stall_seconds: float, json: Path | None, metrics: Path | int | None, trace: Path | None) -> None:
        self._stall_seconds = stall_seconds
        self._json = json
        self._metrics_to = metrics
        self._trace = trace
        self._messages = MessageNotes()
        # At once: all ranks must count messages from the first one to number them alike.
        self._messages.install()
        self._metrics: Metrics | None = None
        self._session: Session | None = None
        self._last: WatchReport | None = None
        self._closed = threading.Event()
        self._unanswered: weakref.ref[dist.ProcessGroup] | None = None
        """Group whose store no longer responds, and which is not watched again."""
        self._ends_by: float | None = None
        """Monotonic time at which the process ends, if it has received `END` while it compares; None otherwise."""
        self._signals = Signals()
        self._hook = sys.excepthook
        sys.excepthook = self._ends_with
        self._thread = BackgroundThread(
            "gradwire watch",
            self._run,
            without="nothing is watched any more in this process",
            on_failure=self._fail,
            end=self._closed.set,
        )
        self._thread.start()
        atexit.register(self.close)
        leave_to_parent(self)

    def leave_to_parent(self) -> None:
        """Turns the watch off in a forked child, which has no thread, and must not use its parent's connection.

        The child's report is the one of the last group whose watch had ended before the fork; None if there was none.
        """
        atexit.unregister(self.close)
        # A new event, because that of the parent may be locked.
        self._closed = threading.Event()
        self._closed.set()
        self._session = None

    @property
    def report(self) -> "WatchReport | None":
        """Findings so far on rank 0 about the present default group, or about the last one if there is none now.

        None on other ranks, and before there was a default group.
        """
        return self._last if self._session is None else self._session.report

    def close(self) -> None:
        """Ends the watch; rank 0 logs its report and writes the JSON file. Python calls it at exit.

        Waits up to 1.2 s for the watch's thread. Exports the metrics a last time, restores torch's methods and
        `sys.excepthook`, and lets signals act again. If SIGTERM has come while the watch handled it, the process ends
        here. A second call does nothing.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(IDLE_SECONDS + 1.0)
        if sys.excepthook == self._ends_with:
            sys.excepthook = self._hook
        if self._metrics is not None:
            self._metrics.close(None if self.report is None else self.report.to_prometheus())
        self._messages.remove()
        if self.report is not None:
            self._leave_report(self.report)
        ends = self._ends_by is not None or END in self._signals.come()
        # From now on signals act at once: if torch still waits for something, a launcher must be able to end it.
        self._signals.close()
        if ends:
            Signals.end()

    def _fail(self, error: BaseException) -> None:
        """Turns the watch off after an error in its thread: signals and aborts act as without a watch."""
        self._session = None
        try:
            self._signals.release()
        finally:
            self._signals.let_abort_go()
            if self._metrics is not None:
                self._metrics.close()

    def _leave_report(self, report: "WatchReport") -> None:
        """Logs the report at the end of the watch, and writes it to the JSON file if one is wanted."""
        log.warning("watch: %s", report)
        if self._json is not None:
            try:
                replace_text(self._json, report.to_json() + "\n")
            except OSError as error:
                log.error("the watch's report cannot be written to %s: %s", self._json, error.strerror)

    def _run(self) -> None:
        """Watches one default group after the other until the watch ends; the body of the watch's thread."""
        while not self._closed.wait(IDLE_SECONDS):
            group = self._group()
            if group is None:
                self._answer_alone()
                continue
            # Imported here, because torch is still being imported when a watch begins.
            from gradwire.comms.watch.collective import TRACE_POLL_SECONDS
            from gradwire.comms.watch.session import CONCLUDE_SECONDS, POLL_SECONDS

            if (session := self._connect(group)) is None:
                continue
            self._session = session
            self._open_metrics(session)
            seconds = POLL_SECONDS if self._trace is None else TRACE_POLL_SECONDS
            self._signals.hold_abort(CONCLUDE_SECONDS)
            while not session.is_over and not self._closed.wait(seconds):
                if not session.leaves:
                    # Again, because the program may have set another handler meanwhile.
                    self._signals.hold_abort(CONCLUDE_SECONDS)
                session.poll()
                self._answer(session)
                self._export(session)
            self._signals.let_abort_go()
            if session.is_unanswered:
                self._unanswered = weakref.ref(group)
            self._last, self._session = session.report, None
        if END in self._signals.come():
            Signals.end()

    def _connect(self, group: dist.ProcessGroup) -> "Session | None":
        """Opens a session; returns None if the store is gone (logged), or the watch or the group ends meanwhile.

        Torch tries to connect to a store whose server is gone until the time-out of the group, and forever if the
        server is stopped (torch 2.13: twice 20 s for a time-out of 20 s). So it connects in another thread, while this
        one handles signals.
        """
        from gradwire.comms.watch.session import POLL_SECONDS, Session

        opened = in_thread(lambda: Session(self._stall_seconds, self._messages, self._trace), "gradwire watch connects")
        while opened.empty():
            if self._closed.wait(POLL_SECONDS) or self._group() is not group:
                return None
            self._answer_alone()
        try:
            return outcome_of(opened.get())
        except Exception as error:  # noqa: BLE001 - whatever it is: the next group is watched
            # If the group has been destroyed meanwhile, the error says nothing.
            if self._group() is group:
                log.warning("watch: the default group is not watched: %s", error)
                self._unanswered = weakref.ref(group)
            return None

    def _answer_alone(self) -> None:
        """Handles signals while no group is watched."""
        signals = self._signals.come()
        if REPORT in signals and self._last is not None:
            log.warning("watch: %s", self._last)
        if END in signals:
            Signals.end()

    def _group(self) -> dist.ProcessGroup | None:
        """Returns the default group; None if there is none, it has one rank, or its store was found not to respond."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        group = dist.group.WORLD
        return None if self._unanswered is not None and self._unanswered() is group else group

    def _answer(self, session: "Session") -> None:
        """Handles signals; before one of them ends the process, ranks that wait compare their collectives."""
        from gradwire.comms.watch.session import CONCLUDE_SECONDS

        signals = self._signals.come()
        if REPORT in signals and session.report is not None:
            log.warning("watch: %s", session.report)
        if HELD_ABORT in signals and not session.leaves:
            session.leave("an abort in C++")
            self._signals.let_abort_go()
        if END in signals:
            # A rank that compares already ends by itself as soon as it has done so.
            if session.leaves:
                self._ends_by = time.monotonic() + CONCLUDE_SECONDS
            else:
                if session.waits:
                    session.leave("a signal that ends it")
                Signals.end()
        # A thread of the program may keep the process from ending by itself.
        if self._ends_by is not None and time.monotonic() > self._ends_by:
            Signals.end()

    def _export(self, session: "Session") -> None:
        """Updates the metrics with the report of a session, if there are metrics and a report."""
        report = session.report
        if self._metrics is not None and report is not None:
            self._metrics.step_ended(report.to_prometheus)

    def _open_metrics(self, session: "Session") -> None:
        """Opens the file or port for the metrics, at the first session in which this rank has the job's report: rank 0.

        Does nothing if no metrics were asked for, or if it has been done. An error is logged, and not tried again.

        Args:
            session: Session that has just begun.
        """
        if self._metrics_to is None or session.report is None or self._metrics is not None:
            return
        from gradwire.comms.observe.metrics import Metrics

        file, port = (None, self._metrics_to) if isinstance(self._metrics_to, int) else (self._metrics_to, None)
        try:
            self._metrics = Metrics(file, port, "127.0.0.1", METRICS_EVERY_SECONDS)
        except OSError as error:
            log.error("the watch's metrics cannot go to %s: %s", self._metrics_to, error.strerror)
            self._metrics_to = None

    def _ends_with(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._hook(kind, error, traceback)
        if self._session is not None and not issubclass(kind, KeyboardInterrupt):
            text = str(error).splitlines()[0][:200] if str(error) else ""
            self._session.leave(f"{kind.__name__}: {text}")


def watch(
    stall_seconds: float = 10.0,
    *,
    json: str | Path | None = None,
    metrics: str | Path | int | None = None,
    trace: str | Path | None = None,
) -> Watch:
    """Watches the collectives of every process group of this job, those of the script, DDP, FSDP2 and others.

    Call it on all ranks, before `init_process_group`; or set GRADWIRE_WATCH=1 and change nothing.

    Args:
        stall_seconds: Time without progress of a group until a warning names the missing ranks and their lines.
        json: File to which rank 0 writes its report at the end; None writes none.
        metrics: File for node_exporter's textfile collector, or port for Prometheus on the loopback address of rank 0's
            host; None exports none.
        trace: File for a timeline of the last collectives of all ranks and groups, for https://ui.perfetto.dev. Rank 0
            replaces it every ten seconds, and when something hangs or ranks disagree. None writes none.

    Returns:
        The watch of this process. There is only one: a second call returns the first one's, and ignores its arguments.

    Raises:
        ValueError: `stall_seconds` is not a positive number.
        RuntimeError: A process group exists already, and torch's flight recorder keeps no collectives.
    """
    global _watch
    if _watch is not None:
        return _watch
    # Check the arguments, and have torch's flight recorder keep collectives: it reads its size when a group is made.
    if not (math.isfinite(stall_seconds) and stall_seconds > 0):
        raise ValueError(f"`stall_seconds` is {stall_seconds}; wanted a positive number of seconds")
    if not flight_recorder_size():
        if dist.is_initialized():
            raise RuntimeError(
                "there is a process group already, and torch's flight recorder keeps no collectives: call "
                f"`gradwire.watch()` before init_process_group, or set {FLIGHT_RECORDER_SIZE}={KEPT}, or {WATCH}=1"
            )
        set_flight_recorder_size(KEPT)
    _watch = Watch(
        stall_seconds,
        None if json is None else Path(json),
        _metrics_place(metrics),
        None if trace is None else Path(trace),
    )
    return _watch


@cache
def install() -> None:
    """Begins the watch that GRADWIRE_WATCH requests, with the options of the other GRADWIRE_WATCH_ variables.

    If a variable is wrong, an error is logged and nothing is watched, because `import torch` must not fail.
    """
    try:
        options = watch_options()
    except ValueError as error:
        log.error("nothing is watched: %s", error)
        return
    watch(options.stall_seconds, json=options.json, metrics=options.metrics, trace=options.trace)


def _metrics_place(given: str | Path | int | None) -> Path | int | None:
    if given is None or isinstance(given, (int, Path)):
        return given
    return int(given) if given.isdigit() else Path(given)
