"""Signals for the watch, which its thread receives even if the main thread waits in a collective forever.

Python runs signal handlers in the main thread. But the C part of the interpreter writes the number of each signal to a
descriptor at once (`signal.set_wakeup_fd`), and the thread of the watch reads it there. csrc/cpu/abort.cpp writes
aborts to the same descriptor, such as gloo's if sizes differ, and holds them until the watch has compared collectives.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from types import FrameType

from gradwire.comms.bootstrap.forks import leave_to_parent
from gradwire.compressors.compiled import native

log = logging.getLogger("gradwire")

REPORT, END = signal.SIGUSR2, signal.SIGTERM
"""Signal that requests a report, and signal with which launchers end the other ranks when one has failed."""

HELD_ABORT = 128 + signal.SIGABRT
"""Number that csrc/cpu/abort.cpp writes for an abort that it holds. Python writes SIGABRT itself for a program's own
handler, which is not held."""


class Signals:
    """Receives `REPORT`, `END` and held aborts, unless the program handles them itself.

    Nothing is received, not even aborts, if the program handles both signals or has a wakeup descriptor of its own, or
    if this is made in another thread than the main one. Also enables `faulthandler` if stderr has a descriptor, so that
    the stacks of all threads are printed if C++ ends the process.

    Thread safety: made and closed in the main thread; `come`, `hold_abort`, `let_abort_go`, `release` and `end` may be
    called from any thread.
    """

    def __init__(self) -> None:
        self._reading: int | None = None
        self._writing = -1
        self._mine: list[signal.Signals] = []
        if sys.stderr is not None and not faulthandler.is_enabled():
            try:
                faulthandler.enable()
            except (OSError, ValueError, AttributeError) as error:
                # The stderr of a notebook has no descriptor.
                log.debug("the stacks of threads cannot be printed when C++ ends the process: %s", error)
        if threading.current_thread() is not threading.main_thread():
            return
        mine = [number for number in (REPORT, END) if signal.getsignal(number) == signal.SIG_DFL]
        if not mine:
            return
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            os.close(reading)
            os.close(writing)
            return
        self._reading, self._writing = reading, writing
        self._mine = mine
        for number in mine:
            signal.signal(number, self._pass_on)
        leave_to_parent(self)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal in the main thread: passes it to the watch if the interpreter has not.

        The interpreter has written the number to another descriptor if a library has set its own since, as asyncio
        does.
        """
        present = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(present, warn_on_full_buffer=present != self._writing)
        if present != self._writing:
            try:
                os.write(self._writing, bytes([number]))
            except OSError as error:
                # The pipe is full: the watch has enough signals to respond to.
                log.debug("signal %d cannot be passed to the watch: %s", number, error)

    def _is_mine(self, number: int) -> bool:
        """Returns whether the watch still handles signal `number`: the program may have set its own handler since."""
        return number in self._mine and signal.getsignal(number) == self._pass_on

    def release(self) -> None:
        """Restores the default action of the signals, from any thread, as without a watch.

        An `END` that was received and not handled yet ends the process at once.
        """
        mine = [number for number in self._mine if self._is_mine(number)]
        for number in mine:
            # `signal.signal` may be called in the main thread only.
            _set_default(number)
        if END in mine and END in self.come():
            os.kill(os.getpid(), END)
        self._mine = []

    def leave_to_parent(self) -> None:
        """Restores the default actions in a forked child, so that its signals are not passed to the parent's watch.

        Closes the child's copies of the pipe: nothing is received there any more.
        """
        if self._reading is None:
            return
        if (set_now := signal.set_wakeup_fd(-1)) != self._writing:
            signal.set_wakeup_fd(set_now)
        for number in filter(self._is_mine, self._mine):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._reading)
        os.close(self._writing)
        self._reading, self._mine = None, []

    def close(self) -> None:
        """Restores the default action of the signals: from now on they act at once.

        Does nothing in another thread than the main one.
        """
        if threading.current_thread() is threading.main_thread():
            for number in filter(self._is_mine, self._mine):
                signal.signal(number, signal.SIG_DFL)
            self._mine = []

    def hold_abort(self, seconds: float) -> None:
        """Delays C++ aborts (SIGABRT) from now on, so that the watch can write its report before the process ends.

        An abort then waits for `let_abort_go`, or `seconds`, and is among the signals of `come` as `HELD_ABORT`. After
        that the handler that was there before runs, such as faulthandler's. Not held are aborts of a thread that holds
        the interpreter (the GIL), because no Python code could run meanwhile, and those in a forked child. Call this
        again and again, because a library may have replaced the handler since.

        It has no effect if this object receives no signals, or if it cannot be found out which thread holds the
        interpreter (no `PyGILState_Check` in the process) or which handler there is.

        Args:
            seconds: Longest time for which an abort is held.
        """
        if self._reading is not None and not native.hold_abort(self._writing, round(1000 * seconds)):
            log.debug("an abort of C++ cannot be held up: this interpreter does not say who has it")

    def let_abort_go(self) -> None:
        """Lets an abort that is held end the process, and later ones at once, until `hold_abort` is called again."""
        native.let_abort_go()

    def come(self) -> frozenset[int]:
        """Returns the signals received since the last call, and `HELD_ABORT` if an abort is held; never waits.

        Signals that the program has handled itself since are left out.
        """
        if self._reading is None:
            return frozenset()
        try:
            received = frozenset(os.read(self._reading, 4096))
        except BlockingIOError:
            return frozenset()
        return received & {HELD_ABORT, *filter(self._is_mine, self._mine)}

    @staticmethod
    def end() -> None:
        """Ends the process by `END`, as the signal would have without a watch; from any thread."""
        _set_default(END)
        os.kill(os.getpid(), END)


def _set_default(number: int) -> None:
    """Restores the system's default action for signal `number`, whatever handler Python has; from any thread."""
    ctypes.CDLL(None).signal(int(number), 0)
