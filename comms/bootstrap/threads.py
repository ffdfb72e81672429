"""Background threads: each handles its own failure, and none is in C++ when the interpreter ends.

An exception that nothing catches ends a thread, and with it whatever only that thread does: callers wait for ever, a
signal is answered by nobody. So every thread of gradwire is a `BackgroundThread`, which has one handler for every
exception: it logs what the job goes on without, and calls what turns the feature off and releases what it holds.

A daemon thread that comes back from C++ while Python is being finalized, from a question to the store or from a tensor
operation, never gets the GIL: before 3.14 Python ends such a thread by unwinding its stack. pybind11 and nanobind take
the GIL back in destructors, which may not be unwound, so the C++ library ends the whole process by SIGABRT, and its
exit code is lost. So before Python is finalized each thread is asked to end and waited for; one that waits for another
rank is made to give up; and what is left then is stopped where it would have ended the process (csrc/cpu/abort.cpp).
Python 3.14 stops such threads by itself.

Torch's own threads of gloo come back in the same way: one lets go of the last collective after who waited for it has
gone on, and with it of what Python had put into the thread's state. A group that DistributedDataParallel has used
outlives `destroy_process_group` (torch 2.13), so its threads are there when Python ends; they are waited for until they
rest.

Source: Python's documentation of PyEval_RestoreThread and of daemon threads (what changed in 3.14); [except.terminate]
of the C++ standard.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

log = logging.getLogger("gradwire")

Argument = TypeVar("Argument")
Result = TypeVar("Result")

EXIT_SECONDS = 5.0
"""Seconds for all threads to end with the process: longer than a bucket takes, which other ranks may wait for."""

GIVE_UP_SECONDS = 2.0
"""Seconds for those that have not ended by then, once they are told to give up: a wait for gloo looks once a second."""

NAP_SECONDS = 0.05

GLOO_THREAD = "pt_gloo_runloop"
"""The name that torch gives those that run gloo's collectives."""

GLOO_SECONDS = 1.0
"""Seconds for gloo's threads to rest; one that waits for a peer rests, too."""

_running: "set[BackgroundThread]" = set()
"""Changed by single calls of its methods, without a lock: garbage that is collected under one might want it, too."""


class BackgroundThread(threading.Thread):
    """A daemon thread that handles its own failure, and has ended when Python is finalized.

    Args:
        name: For debuggers and traces.
        target: What it does.
        without: What the job goes on without if the thread fails, as a clause of the message: `nothing is watched any
            more`. None logs nothing, for threads whose `on_failure` hands the exception to a caller that raises it.
        on_failure: Called in the thread with the exception that has ended `target`, whichever it is: turns the feature
            off, wakes who waits for the thread, and releases what it holds.
        end: Has it end soon, when the process does; None where its owner's finalizer does that.
        give_up: Has it leave a wait for other ranks that would outlast the process; None where it waits for none.
        awaited: Whether the end of the process waits for it. Not for one that calls Python's own library alone, which
            can be ended anywhere.
    """

    def __init__(
        self,
        name: str,
        target: Callable[[], object],
        *,
        without: str | None,
        on_failure: Callable[[BaseException], object],
        end: Callable[[], object] | None = None,
        give_up: Callable[[], object] | None = None,
        awaited: bool = True,
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._without = without
        self._on_failure: Callable[[BaseException], object] | None = on_failure
        self._end = end
        self._give_up = give_up
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
        except BaseException as error:  # noqa: BLE001 - whatever it is, SystemExit too: nothing else would hear of it
            self._fail(error)
        finally:
            self._on_failure = self._end = self._give_up = None  # with what they hold
            _running.discard(self)

    def _fail(self, error: BaseException) -> None:
        """Says what has happened, and turns the feature off; raises nothing."""
        try:
            if self._without is not None:
                log.error(
                    "the thread %r has failed (%s: %s); %s",
                    self.name,
                    type(error).__name__,
                    error,
                    self._without,
                    exc_info=error,
                )
        finally:  # a log handler of the program's may raise, too
            try:
                if self._on_failure is not None:
                    self._on_failure(error)
            except BaseException as second:  # noqa: BLE001 - the thread ends here in any case
                log.error("what the thread %r held could not be released: %r", self.name, second)

    def ask_to_end(self) -> None:
        """Has it end soon; returns at once."""
        if (end := self._end) is not None:
            end()

    def make_give_up(self) -> None:
        """Has it leave a wait for other ranks; returns at once."""
        if (give_up := self._give_up) is not None:
            give_up()


def in_thread(call: Callable[[], Result], name: str, *, awaited: bool = True) -> "SimpleQueue[Result | BaseException]":
    """Has a thread call what may not come back, and puts there what it returns or raises: see `outcome_of`."""
    told: SimpleQueue[Result | BaseException] = SimpleQueue()
    BackgroundThread(name, lambda: told.put(call()), without=None, on_failure=told.put, awaited=awaited).start()
    return told


def call_each(
    call: Callable[[Argument], Result], arguments: Iterable[Argument], name: str, *, awaited: bool = True
) -> list[Result]:
    """Calls with each of some arguments at once, in a thread each, and returns the results in the same order.

    Unlike an executor of `concurrent.futures` it also works while the process ends: those take no calls once the main
    thread has ended, though finalizers are yet to come.

    Args:
        call: Ends by itself, within a bounded time.
        arguments: Few.
        name: Of the threads.
        awaited: As of `BackgroundThread`.

    Raises:
        BaseException: What the first call that failed has raised, once all have ended.
    """
    told = [in_thread(partial(call, each), name, awaited=awaited) for each in arguments]
    found = [each.get() for each in told]
    return [outcome_of(each) for each in found]


def outcome_of(found: Result | BaseException) -> Result:
    """Returns what a thread has returned, or raises what it has raised."""
    if not isinstance(found, BaseException):
        return found
    try:
        raise found
    finally:
        del found  # else the error, its frames and what they hold would be a circle


def wait_for_all(seconds: float = EXIT_SECONDS, give_up_seconds: float = GIVE_UP_SECONDS) -> list[str]:
    """Asks the threads that run to end, and waits for them; then makes those that are left give up.

    Args:
        seconds: For threads to end by themselves.
        give_up_seconds: For those that have not, once they were told to give up.

    Returns:
        The names of those that have not ended.
    """
    left = _wait(BackgroundThread.ask_to_end, seconds)
    return [thread.name for thread in (left and _wait(BackgroundThread.make_give_up, give_up_seconds))]


def _wait(say: Callable[[BackgroundThread], object], seconds: float) -> set[BackgroundThread]:
    """Says something to each thread that runs, once, and waits for them; those that are left."""
    deadline = time.monotonic() + seconds
    told: set[BackgroundThread] = set()
    while True:
        # A copy: a thread that ends may ask the store, which starts one.
        left = {thread for thread in _running.copy() if thread.is_alive()}
        for thread in left - told:
            try:
                say(thread)
            except Exception as error:  # noqa: BLE001 - the others are to end all the same
                log.error("the thread %r cannot be told to end: %r", thread.name, error)
        told |= left
        if not left or time.monotonic() >= deadline:
            return left
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
    if left or "gradwire._native" in sys.modules:  # else nothing of this process waits in C++
        try:
            from gradwire.compressors.compiled import native
        except (ImportError, RuntimeError) as error:  # as in `gradwire doctor` from the wheel for every machine
            log.debug("threads in C++ may end the process: %s", error)
            return
        if not native.stop_unwound_threads():
            log.debug("this interpreter does not say when it is being finalized: threads in C++ may end the process")


_process = _Process()
weakref.finalize(_process, _at_exit)
"""Finalizers that are left at exit run youngest first: those of gradwire's objects, which close them, before this."""
