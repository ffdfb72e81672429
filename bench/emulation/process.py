"""What a child process needs from the kernel."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), <linux/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, so that no rank outlives the command that started it.

    Args:
        parent: Process id of the parent as it was before the fork.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
