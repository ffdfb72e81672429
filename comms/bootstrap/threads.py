"""Threads beside the training, none of which is in C++ when the interpreter ends.

A daemon thread that comes back from C++ while Python is being finalized, from a question to the store or from a tensor
operation, never gets the GIL: before 3.14 Python ends such a thread by unwinding its stack. pybind11 gives the GIL up
and takes it back in destructors, which may not be unwound, so the C++ library ends the whole process by SIGABRT, after
the training has done all its work. So before Python is finalized each thread is asked to end, and waited for.

Torch's own threads of gloo come back in the same way: one lets go of the last collective after who waited for it has
gone on, and with it of what Python had put into the thread's state. A group that DistributedDataParallel has used
outlives `destroy_process_group` (torch 2.13), so its threads are there when Python ends; they are waited for until they
rest.

Source: Python's documentation of PyEval_RestoreThread and of daemon threads; [except.terminate] of the C++ standard.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

log = logging.getLogger("gradwire")

Result = TypeVar("Result")

EXIT_SECONDS = 5.0
"""Seconds for all threads to end with the process. One that C++ does not give back for longer is left behind: it is
unlikely to come back in the tenth of a second that the rest of the exit takes."""

NAP_SECONDS = 0.05

GLOO_THREAD = "pt_gloo_runloop"
"""The name that torch gives those that run gloo's collectives."""

GLOO_SECONDS = 1.0
"""Seconds for gloo's threads to rest; one that waits for a peer rests, too."""

_running: "set[BackgroundThread]" = set()
"""Changed by single calls of its methods, without a lock: garbage that is collected under one might want it, too."""


class BackgroundThread(threading.Thread):
    """A daemon thread that has ended when Python is finalized.

    Args:
        name: For debuggers and traces.
        target: What it does.
        end: Has it end soon, when the process does; None where its owner's finalizer does that.
        awaited: Whether the end of the process waits for it. Not for one that calls Python's own library alone, which
            can be ended anywhere.
    """

    def __init__(
        self,
        name: str,
        target: Callable[[], object],
        *,
        end: Callable[[], object] | None = None,
        awaited: bool = True,
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._end = end
        self._awaited = awaited

    def start(self) -> None:
        """See `threading.Thread.start`."""
        if self._awaited:
            _running.add(self)
        try:
            super().start()
        except BaseException:
            _running.discard(self)
            raise

    def run(self) -> None:
        """See `threading.Thread.run`."""
        try:
            super().run()
        finally:
            _running.discard(self)

    def ask_to_end(self) -> None:
        """Has it end soon; returns at once."""
        if self._end is not None:
            self._end()


def in_thread(call: Callable[[], Result], name: str) -> "SimpleQueue[Result | BaseException]":
    """Has a thread call what may not come back, and puts there what it returns or raises: see `outcome_of`."""
    told: SimpleQueue[Result | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            told.put(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the result is wanted
            told.put(error)

    BackgroundThread(name, run).start()
    return told


def outcome_of(found: Result | BaseException) -> Result:
    """Returns what a thread has returned, or raises what it has raised."""
    if not isinstance(found, BaseException):
        return found
    try:
        raise found
    finally:
        del found  # else the error, its frames and what they hold would be a circle


def wait_for_all(seconds: float = EXIT_SECONDS) -> list[str]:
    """Asks the threads that run to end, and waits for them.

    Returns:
        The names of those that have not ended.
    """
    deadline = time.monotonic() + seconds
    asked: set[BackgroundThread] = set()
    while True:
        # A copy: a thread that ends may ask the store, which starts one.
        left = {thread for thread in _running.copy() if thread.is_alive()}
        for thread in left - asked:
            thread.ask_to_end()
        asked |= left
        if not left or time.monotonic() >= deadline:
            return [thread.name for thread in left]
        next(iter(left)).join(NAP_SECONDS)


def gloo_rests(tasks: Path = Path("/proc/self/task")) -> bool:
    """Whether none of torch's threads of gloo runs or wants to (proc_pid_stat(5): states R and D)."""
    for stat in tasks.glob("*/stat"):
        try:
            name, state = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
        except (FileNotFoundError, ProcessLookupError):  # has ended meanwhile
            continue
        if name == GLOO_THREAD and state[0] in "RD":
            return False
    return True


def wait_for_gloo() -> None:
    """Waits until torch's threads of gloo rest, without the GIL, which they may want."""
    deadline = time.monotonic() + GLOO_SECONDS
    resting = 0
    while resting < 2 and time.monotonic() < deadline:  # twice: one that has just been given the GIL runs on
        time.sleep(NAP_SECONDS / 10)
        resting = resting + 1 if gloo_rests() else 0


class _Process:
    """What lives as long as this module."""


def _at_exit() -> None:
    if left := wait_for_all():
        log.debug("still in C++ at the end of the process: %s", ", ".join(left))
    wait_for_gloo()


_process = _Process()
weakref.finalize(_process, _at_exit)
"""Finalizers that are left at exit run youngest first: those of gradwire's objects, which close them, before this."""
