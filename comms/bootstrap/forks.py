"""Closes a rank's connections in its forks, which would otherwise keep them open after the rank has exited.

A DataLoader's workers are forks. They outlive a killed rank by seconds, and as long as one of them has copies of its
sockets, the kernel does not close the connections: neither the liveness ring nor gloo would notice the exit. An
executed program inherits no descriptor from Python (PEP 446), but a fork has all of them.
"""

import os
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


def _in_child() -> None:
    """Closes all registered connections, once, in a forked child."""
    global _all
    for each in list(_all):
        each.leave_to_parent()
    _all = weakref.WeakSet()


os.register_at_fork(after_in_child=_in_child)
