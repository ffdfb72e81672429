"""Closes a rank's connections in its forks, which would otherwise keep them open after the rank has exited.

A DataLoader's workers are forks. They outlive a killed rank by seconds, and as long as one of them has copies of its
sockets, the kernel does not close the connections: neither the liveness ring nor gloo would notice the exit. An
executed program inherits no descriptor from Python (PEP 446), but a fork has all of them.
"""

import os
import signal
import threading
import weakref
from typing import Protocol


class LeftToParent(Protocol):
    """An object with connections to other ranks."""

    def leave_to_parent(self) -> None:
        """Closes the child's copies of this object's sockets without sending anything.

        Must take no lock: a thread of the parent may have held it at the fork.
        """


_all: "weakref.WeakSet[LeftToParent]" = weakref.WeakSet()


def leave_to_parent(connected: LeftToParent) -> None:
    """Calls `leave_to_parent` of an object in every fork of this process.

    Args:
        connected: The object; a weak reference is kept.
    """
    _all.add(connected)


def replace_descriptor(descriptor: int) -> None:
    """Closes a forked child's copy of a descriptor that its owner in C++ may close again later.

    /dev/null takes the number, so that no file that the child opens later gets it.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


_before = threading.local()


def _hold_signals() -> None:
    """Blocks signals in the thread that forks: in the child they would reach what is still the parent's.

    A pool ends a worker by SIGTERM that may just begin. The handler in the child wrote to the pipe of the parent's
    watch, which then ended the parent.
    """
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_signals_go() -> None:
    """Restores the signals that were blocked before the fork."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _in_child() -> None:
    """Closes all registered connections, once, in a forked child, and then lets signals through."""
    global _all
    try:
        for each in list(_all):
            each.leave_to_parent()
    finally:
        _all = weakref.WeakSet()
        _let_signals_go()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_go, after_in_child=_in_child)
