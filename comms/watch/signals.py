"""Signals that a watch responses also where the main thread waits in a collective for ever.

Python's handlers run in the main thread. But when a signal comes its number is written to a descriptor, at once, by the
C part of the interpreter; the thread of the watch reads that. So it hears of an abort, too, as gloo's for unlike sizes,
and has a moment to say what it knows: csrc/cpu/abort.cpp.
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
"""What asks for a report, and what launchers end other ranks with when one has failed."""

HELD_ABORT = 128 + signal.SIGABRT
"""What csrc/cpu/abort.cpp writes where it holds an abort up; SIGABRT itself is written for a program's own handler."""


class Signals:
    """The signals that have come, of those that the program leaves alone; none, where it has such a descriptor itself.

    Also has the interpreter say where each thread stands where C++ ends the process, as gloo does for unlike sizes.
    """

    def __init__(self) -> None:
        self._reading: int | None = None
        self._writing = -1
        self._mine: list[signal.Signals] = []
        if sys.stderr is not None and not faulthandler.is_enabled():
            try:
                faulthandler.enable()
            except (OSError, ValueError, AttributeError) as error:  # a notebook's stderr has no descriptor
                log.debug("where threads stand cannot be printed when C++ ends the process: %s", error)
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
        """Python's handler, in the main thread; by then the thread of the watch has been told, or this does it.

        Another library may have put a descriptor of its own there since, as asyncio does for its signals.
        """
        told = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(told, warn_on_full_buffer=told != self._writing)
        if told != self._writing:
            try:
                os.write(self._writing, bytes([number]))
            except OSError as error:  # full: it has enough to response
                log.debug("the watch cannot be told of signal %d: %s", number, error)

    def _is_mine(self, number: int) -> bool:
        """Whether the program still leaves a signal to the watch: it may have set a handler of its own since."""
        return number in self._mine and signal.getsignal(number) == self._pass_on

    def release(self) -> None:
        """Leaves the signals to the system again, from any thread: they act on this process as without a watch.

        One that has come and was not answered yet is answered so at once.
        """
        mine = [number for number in self._mine if self._is_mine(number)]
        for number in mine:
            _set_default(number)  # `signal.signal` may be called in the main thread alone
        if END in mine and END in self.come():
            os.kill(os.getpid(), END)
        self._mine = []

    def leave_to_parent(self) -> None:
        """Has a signal end a forked child, as ever, and its parent hear nothing of it."""
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
        """Leaves the signals to the system again: what ends the process now ends it at once. In the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in filter(self._is_mine, self._mine):
                signal.signal(number, signal.SIG_DFL)
            self._mine = []

    def hold_abort(self, seconds: float) -> None:
        """Has an abort from C++, which comes from now on, wait for `let_abort_go`; again and again, as handlers change.

        Args:
            seconds: How long at most.
        """
        if self._reading is not None and not native.hold_abort(self._writing, round(1000 * seconds)):
            log.debug("an abort of C++ cannot be held up: this interpreter does not say who has it")

    def let_abort_go(self) -> None:
        """Lets an abort that waits end the process, and those to come at once."""
        native.let_abort_go()

    def come(self) -> frozenset[int]:
        """The signals that have come since the last call, of those that are the watch's, and `HELD_ABORT`."""
        if self._reading is None:
            return frozenset()
        try:
            heard = frozenset(os.read(self._reading, 4096))
        except BlockingIOError:
            return frozenset()
        return heard & {HELD_ABORT, *filter(self._is_mine, self._mine)}

    @staticmethod
    def end() -> None:
        """Ends the process as the signal would have without a watch; from any thread."""
        _set_default(END)
        os.kill(os.getpid(), END)


def _set_default(number: int) -> None:
    """Has the system act on a signal, whatever handler Python has; any thread."""
    ctypes.CDLL(None).signal(int(number), 0)
