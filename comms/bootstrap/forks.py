"""What a fork of a rank gives up at once: connections that it would hold open for a rank that has ended.

A DataLoader's workers are forks. They outlive a rank that is killed by seconds, and as long as one of them has its
sockets, no kernel says to anybody that the rank has ended: neither to the ring, nor through gloo's connections. Python
opens no descriptor in a program that is executed (PEP 446), but a fork has all of them.
"""

import os
import weakref
from typing import Protocol


class LeftToParent(Protocol):
    """Something with connections."""

    def leave_to_parent(self) -> None:
        """Closes the child's copies, and says nothing over them; takes no lock (in a forked child)."""


_all: "weakref.WeakSet[LeftToParent]" = weakref.WeakSet()


def leave_to_parent(connected: LeftToParent) -> None:
    """Has forks of this process give up what an object has connected.

    Args:
        connected: Not kept alive.
    """
    _all.add(connected)


def replace_descriptor(descriptor: int) -> None:
    """Closes its copy of a descriptor whose owner, in C++, may yet close the number (in a forked child).

    The number stays taken, by /dev/null: nothing that the child opens later gets it.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _in_child() -> None:
    global _all
    for each in list(_all):
        each.leave_to_parent()
    _all = weakref.WeakSet()


os.register_at_fork(after_in_child=_in_child)
