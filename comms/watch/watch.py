"""`gradwire.watch()` and GRADWIRE_WATCH=1: the life of a watch in one process.

A thread waits for a default group, looks at it for as long as it lasts, and for the next one after it. Nothing that is
computed changes: the thread reads torch's own flight recorder, and point-to-point messages are noted as they are sent.
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
"""Collectives of each rank that torch's flight recorder keeps, where nobody has said how many: what ranks compare when
one of them hangs. To read so many with their lines takes some 0.1 s, once."""

IDLE_SECONDS = 0.2
METRICS_EVERY_SECONDS = 5.0

_watch: "Watch | None" = None


class Watch:
    """What is watched in this process.

    Args:
        stall_seconds: Without progress of a group, until a warning says so.
        json: A file for the report, written by rank 0 at the end; None writes none.
        metrics: A file for node_exporter's textfile collector or a port of this host, by rank 0; None has none.
        trace: A file for the timeline, written by rank 0 every ten seconds; None writes none.
    """

    def __init__(self, stall_seconds: float, json: Path | None, metrics: Path | int | None, trace: Path | None) -> None:
        self._stall_seconds = stall_seconds
        self._json = json
        self._metrics_to = metrics
        self._trace = trace
        self._messages = MessageNotes()
        self._messages.install()  # at once: ranks number messages alike only if they all begin with the first one
        self._metrics: Metrics | None = None
        self._session: Session | None = None
        self._last: WatchReport | None = None
        self._closed = threading.Event()
        self._unanswered: weakref.ref[dist.ProcessGroup] | None = None
        """The group whose store no longer responses: it is not watched again."""
        self._ends_by: float | None = None
        """Monotonic seconds by which a process that compares first ends, having been told to; None: nobody has."""
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
        """Watches nothing in a forked child: it has no thread, and the store's connection is its parent's."""
        atexit.unregister(self.close)
        self._closed = threading.Event()  # the parent's may be locked
        self._closed.set()
        self._session = None

    @property
    def report(self) -> "WatchReport | None":
        """What was found so far, on rank 0; None elsewhere, and before there was a default group."""
        return self._last if self._session is None else self._session.report

    def close(self) -> None:
        """Ends the watch; rank 0 logs its report, and writes the JSON file."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(IDLE_SECONDS + 1.0)
        if sys.excepthook == self._ends_with:
            sys.excepthook = self._hook
        if self._metrics is not None:
            self._metrics.close(self.report)
        self._messages.remove()
        if self.report is not None:
            self._leave_report(self.report)
        ends = self._ends_by is not None or END in self._signals.come()
        self._signals.close()  # what torch still waits for behind this, a launcher must be able to end
        if ends:
            Signals.end()

    def _fail(self, error: BaseException) -> None:
        """Turns the watch off: a signal, an abort and the end of the program are as without it."""
        self._session = None
        try:
            self._signals.release()
        finally:
            self._signals.let_abort_go()
            if self._metrics is not None:
                self._metrics.close()

    def _leave_report(self, report: "WatchReport") -> None:
        log.warning("watch: %s", report)
        if self._json is not None:
            try:
                replace_text(self._json, report.to_json() + "\n")
            except OSError as error:
                log.error("the watch's report cannot be written to %s: %s", self._json, error.strerror)

    def _run(self) -> None:
        while not self._closed.wait(IDLE_SECONDS):
            group = self._group()
            if group is None:
                self._answer_alone()
                continue
            # Here: torch is being imported when a watch begins.
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
                    self._signals.hold_abort(CONCLUDE_SECONDS)  # again: the program may have put another handler there
                session.look()
                self._answer(session)
                self._export(session)
            self._signals.let_abort_go()
            if session.is_unanswered:
                self._unanswered = weakref.ref(group)
            self._last, self._session = session.report, None
        if END in self._signals.come():
            Signals.end()

    def _connect(self, group: dist.ProcessGroup) -> "Session | None":
        """Watches the default group; None where its store is gone, or the watch or the group ends meanwhile.

        Torch goes on connecting to a store whose server is gone until the time-out of the group, and for ever where it
        is stopped (seen on torch 2.13: twice 20 s for a time-out of 20 s). Signals are heard meanwhile.
        """
        from gradwire.comms.watch.session import POLL_SECONDS, Session

        told = in_thread(lambda: Session(self._stall_seconds, self._messages, self._trace), "gradwire watch connects")
        while told.empty():
            if self._closed.wait(POLL_SECONDS) or self._group() is not group:
                return None
            self._answer_alone()
        try:
            return outcome_of(told.get())
        except Exception as error:  # noqa: BLE001 - whatever it is: the next group is watched
            if self._group() is group:  # else it has been destroyed meanwhile, and is no business of a watch's
                log.warning("watch: the default group is not watched: %s", error)
                self._unanswered = weakref.ref(group)
            return None

    def _answer_alone(self) -> None:
        """Does what signals ask for where no group is watched."""
        signals = self._signals.come()
        if REPORT in signals and self._last is not None:
            log.warning("watch: %s", self._last)
        if END in signals:
            Signals.end()

    def _group(self) -> dist.ProcessGroup | None:
        """The default group, where there is one to be watched."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        group = dist.group.WORLD
        return None if self._unanswered is not None and self._unanswered() is group else group

    def _answer(self, session: "Session") -> None:
        """Does what signals ask for; before the process ends for one of them, ranks that wait compare what they did."""
        from gradwire.comms.watch.session import CONCLUDE_SECONDS

        signals = self._signals.come()
        if REPORT in signals and session.report is not None:
            log.warning("watch: %s", session.report)
        if HELD_ABORT in signals and not session.leaves:
            session.leave("an abort in C++")
            self._signals.let_abort_go()
        if END in signals:
            if session.leaves:  # it ends by itself in a moment: as soon as it has compared
                self._ends_by = time.monotonic() + CONCLUDE_SECONDS
            else:
                if session.waits:
                    session.leave("a signal that ends it")
                Signals.end()
        if self._ends_by is not None and time.monotonic() > self._ends_by:  # a thread of the program's keeps it here
            Signals.end()

    def _export(self, session: "Session") -> None:
        report = session.report
        if self._metrics is not None and report is not None:
            self._metrics.step_ended(lambda: report)

    def _open_metrics(self, session: "Session") -> None:
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
    """Watches the collectives of every process group of this job, whoever issues them.

    Call it on all ranks, before `init_process_group`; or set GRADWIRE_WATCH=1 and change nothing.

    Args:
        stall_seconds: Without progress of a group for so many seconds a warning says who has not come, and where it is.
        json: A file that rank 0 writes its report to at the end.
        metrics: A file for node_exporter's textfile collector, or a port for Prometheus, which rank 0's host alone can
            ask.
        trace: A file for a timeline of the last collectives of all ranks and groups, for https://ui.perfetto.dev; rank
            0 writes it anew every ten seconds, and when something hangs.

    Returns:
        The watch of this process; there is one: a second call returns the first one's.

    Raises:
        ValueError: `stall_seconds` is not a positive number.
        RuntimeError: There is a process group already, and torch's flight recorder keeps nothing.
    """
    global _watch
    if _watch is not None:
        return _watch
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
    """Begins the watch that GRADWIRE_WATCH asks for, with what its further variables say.

    One that is not what it should be is told of, and nothing is watched: `import torch` must not fail for it.
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
