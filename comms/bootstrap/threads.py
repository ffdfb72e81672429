"""Background threads: each handles its own failure, and none is in C++ when the interpreter is finalized.

An uncaught exception ends a thread, and with it whatever only that thread does: callers wait forever, a signal is not
handled. So every thread that `comms/` or the doctor starts is a `BackgroundThread`, which has one handler for every
exception: it logs what the job continues without, and calls a function that turns the feature off and releases its
resources.

These are the threads of `comms/`; their names begin with `gradwire`. A rank that trains on CPUs has the first four
kinds; on CUDA it has `liveness` in place of lanes.

| thread | begins with | ends with |
|---|---|---|
| `<communicator> lane <lane>` | the first job of a lane | `Executor.close`, after the jobs in flight |
| `store`, one for each connection to a store | a request | `IDLE_SECONDS` of store.py without a request |
| `probe server`, one for the process | the first communicator | the close of the last one |
| `stall watch <rank>` | a session of several ranks, unless switched off | `Observer.close` |
| `liveness <rank>` | a communicator on CUDA; each generation of elastic training | the first failure, or its close |
| `heartbeat <rank>` | in elastic training alone, its `liveness` | that one |
| `requests` | the end of rank 0's first step in elastic training with `extra_state` | `Requests.close` |
| `streams`, one for each transport | the first large message over a long path | the end of the transport |
| `<group>` of the backend, on one node | the group's first collective through shared memory | its `shutdown` |
| `metrics` | `export_metrics(port=...)` | `Observer.close` |
| `watch` | `gradwire.watch()` | the end of the process |

All others of `comms/` are for one call, and end with it: connecting, probing, looking up names, gathering, aborting
NCCL. `probe server`, `heartbeat`, `metrics` and the calls that probe, look up names or close connections are made with
`awaited=False`: they call only Python's library, so the process ends with them, and nobody asks or joins them.

The doctor's threads (`doctor's gloo`, `doctor sends`, ...) are in its own processes and in those of a script that it
runs. Plain threads and pools are in bench/emulation, bench/studies and topology/gdr/inputs/collect.py, none of them in
a user's job.

A daemon thread that returns from C++ while Python is being finalized, from a store request or a tensor operation, never
gets the GIL: before 3.14 Python ends such a thread by unwinding its stack. pybind11 and nanobind take the GIL back in
destructors, which may not be unwound, so the C++ library ends the whole process by SIGABRT, and its exit code is lost.
So before Python is finalized each thread is asked to end and is joined; one that waits for another rank is made to stop
waiting; and a thread that is still left is stopped at the point where it would have ended the process
(csrc/cpu/abort.cpp). Python 3.14 stops such threads by itself.

Torch's own gloo threads return in the same way: a thread drops the last collective after its waiter has gone on, and
with it the Python objects in the thread's state. A group that DistributedDataParallel has used outlives
`destroy_process_group` (torch 2.13), so its threads exist when Python ends; they are waited for until they are idle.

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
"""Time at exit for all threads to end by themselves: longer than a bucket takes, which other ranks may wait for."""

GIVE_UP_SECONDS = 2.0
"""Time for the remaining threads to stop waiting for other ranks: a wait for gloo polls once a second."""

NAP_SECONDS = 0.05
"""Seconds between two checks whether a thread has ended."""

GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives the threads that run gloo's collectives."""

GLOO_SECONDS = 1.0
"""Time for gloo's threads to become idle; one that waits for a peer counts as idle."""

_running: "set[BackgroundThread]" = set()
"""Running threads that are joined at exit. Changed by single atomic calls, without a lock: the garbage collector could
run a finalizer that takes the same lock."""


class BackgroundThread(threading.Thread):
    """Daemon thread that handles its own failure, and is asked to end and joined at exit, unless `awaited` is False.

    Args:
        name: Thread name, for debuggers and traces.
        target: Function to run.
        without: Consequence of a failure of the thread, as a clause of the log message: `nothing is watched any more`.
            None logs nothing, for threads whose `on_failure` passes the exception to a caller that raises it.
        on_failure: Called with the exception that ended `target`, in the thread, or in its starter if it cannot be
            started: turns the feature off, wakes waiters and releases resources. Takes no lock that its starter holds.
        end: Asks the thread to end soon, at exit; None if its owner's finalizer does that.
        give_up: Makes the thread stop waiting for other ranks, at exit; None if it does not wait for any.
        awaited: Join the thread at exit. False for one that calls only Python's standard library, which may be ended
            anywhere.
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
        """Starts the thread. From now on, until it ends, it is joined at exit if it was made with `awaited`.

        A thread that cannot be started has failed: nothing is raised, the failure is logged like one of the target, and
        `on_failure` is called here. The user or the container may have no more threads (`ulimit -u`, pids.max), or
        Python may be ending.
        """
        if self._awaited:
            _running.add(self)
        try:
            super().start()
        except RuntimeError as error:
            self._finish(error)
        except BaseException:
            _running.discard(self)
            raise

    def run(self) -> None:
        """Runs the target. An exception of it is logged, unless `without` is None, and passed to `on_failure`."""
        try:
            super().run()
        except BaseException as error:  # noqa: BLE001 - SystemExit, too: nothing else would report it
            self._finish(error)
        else:
            self._finish(None)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, for `timeout` seconds at most; not at all if it has not been started."""
        if self.ident is not None:
            super().join(timeout)

    def _finish(self, error: BaseException | None) -> None:
        """Handles the failure, if there was one, and releases the objects that this thread's functions refer to."""
        try:
            if error is not None:
                self._fail(error)
        finally:
            self._on_failure = self._end = self._give_up = None
            _running.discard(self)

    def _fail(self, error: BaseException) -> None:
        """Logs the failure, unless `without` is None, and calls `on_failure`, whose own exception is only logged."""
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
        finally:
            # In any case: a log handler of the user's program may raise.
            try:
                if self._on_failure is not None:
                    self._on_failure(error)
            except BaseException as second:  # noqa: BLE001 - the thread ends here in any case
                log.error("what the thread %r held could not be released: %r", self.name, second)

    def ask_to_end(self) -> None:
        """Calls `end`, which asks the thread to end soon and returns at once; does nothing if there is no `end`."""
        if (end := self._end) is not None:
            end()

    def make_give_up(self) -> None:
        """Calls `give_up`, which ends a wait of the thread for other ranks and returns at once; nothing without one."""
        if (give_up := self._give_up) is not None:
            give_up()


def in_thread(call: Callable[[], Result], name: str, *, awaited: bool = True) -> "SimpleQueue[Result | BaseException]":
    """Calls a function, which may never return, in a thread of its own, and returns at once.

    Args:
        call: The function.
        name: Name of the thread.
        awaited: Whether the thread is joined at exit; see `BackgroundThread`.

    Returns:
        Queue that receives one value: the function's result, or its exception, which `outcome_of` raises.
    """
    outcome: SimpleQueue[Result | BaseException] = SimpleQueue()
    BackgroundThread(name, lambda: outcome.put(call()), without=None, on_failure=outcome.put, awaited=awaited).start()
    return outcome


def call_each(
    call: Callable[[Argument], Result], arguments: Iterable[Argument], name: str, *, awaited: bool = True
) -> list[Result]:
    """Calls a function with each argument in parallel, in a thread each, and returns the results in the same order.

    Unlike an executor of `concurrent.futures` it also works at exit: those take no calls once the main thread has
    ended, although finalizers run after that.

    Args:
        call: Function that ends by itself within a bounded time.
        arguments: Arguments; each one costs a thread.
        name: Name of the threads.
        awaited: Join the threads at exit; see `BackgroundThread`.

    Raises:
        BaseException: A call failed; raised after all have ended. If several did, the first one in the order of
            `arguments`.
    """
    outcomes = [in_thread(partial(call, each), name, awaited=awaited) for each in arguments]
    found = [each.get() for each in outcomes]
    return [outcome_of(each) for each in found]


def outcome_of(found: Result | BaseException) -> Result:
    """Returns the value from the queue of `in_thread`, or raises it if it is an exception."""
    if not isinstance(found, BaseException):
        return found
    try:
        raise found
    finally:
        # Break the reference cycle of the exception, its traceback and this frame.
        del found


def wait_for_all(seconds: float = EXIT_SECONDS, give_up_seconds: float = GIVE_UP_SECONDS) -> list[str]:
    """Asks all running threads that are joined at exit to end, and joins them.

    Those that still run after `seconds` are made to stop waiting for other ranks, and are joined again.

    Args:
        seconds: Time for threads to end by themselves.
        give_up_seconds: Time for the remaining ones after that.

    Returns:
        Names of the threads that have not ended.
    """
    left = _wait(BackgroundThread.ask_to_end, seconds)
    return [thread.name for thread in (left and _wait(BackgroundThread.make_give_up, give_up_seconds))]


def _wait(notify: Callable[[BackgroundThread], object], seconds: float) -> set[BackgroundThread]:
    """Calls `notify` once with each running thread, joins the threads, and returns those that still run at the end.

    Args:
        notify: Asks a thread to end, or to stop waiting; returns at once.
        seconds: Time for all threads together to end.
    """
    deadline = time.monotonic() + seconds
    notified: set[BackgroundThread] = set()
    while True:
        # A copy: a thread that ends may ask the store, which starts one.
        left = {thread for thread in _running.copy() if thread.is_alive()}
        for thread in left - notified:
            try:
                notify(thread)
            except Exception as error:  # noqa: BLE001 - the others are to end all the same
                log.error("the thread %r cannot be told to end: %r", thread.name, error)
        notified |= left
        if not left or time.monotonic() >= deadline:
            return left
        next(iter(left)).join(NAP_SECONDS)


def gloo_rests(tasks: Path = Path("/proc/self/task")) -> bool:
    """Returns whether none of torch's gloo threads is running or runnable (proc_pid_stat(5): states R and D)."""
    for stat in tasks.glob("*/stat"):
        try:
            name, state = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended meanwhile.
            continue
        if name == GLOO_THREAD and state[0] in "RD":
            return False
    return True


def wait_for_gloo() -> None:
    """Waits, without holding the GIL, until torch's gloo threads are idle; for `GLOO_SECONDS` at most."""
    deadline = time.monotonic() + GLOO_SECONDS
    resting = 0
    # Twice in a row: a thread that has just been given the GIL runs on.
    while resting < 2 and time.monotonic() < deadline:
        time.sleep(NAP_SECONDS / 10)
        resting = resting + 1 if gloo_rests() else 0


class _Process:
    """Lives as long as this module, so that its finalizer runs at exit."""


def _at_exit() -> None:
    """Joins all threads; stops what is left in C++ before it could end the process by SIGABRT."""
    if left := wait_for_all():
        log.debug("still in C++ at the end of the process: %s", ", ".join(left))
    wait_for_gloo()
    # Otherwise no thread of this process waits in C++.
    if left or "gradwire._native" in sys.modules:
        try:
            from gradwire.compressors.compiled import native
        except (ImportError, RuntimeError) as error:
            # As in `gradwire doctor` from the wheel without compiled code.
            log.debug("threads in C++ may end the process: %s", error)
            return
        if not native.stop_unwound_threads():
            log.debug("this interpreter does not say when it is being finalized: threads in C++ may end the process")


_process = _Process()
weakref.finalize(_process, _at_exit)
"""Its finalizer runs after those of gradwire's objects, which close them: at exit the youngest finalizer runs first."""
