"""Ends of a process by a signal, and with its parent."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(SystemExit):
    """Exit because of a signal that ends the process; the exit status is 128 plus the signal's number."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: a second signal must not cut the cleaning up short.
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise EndedBySignal(128 + number)


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Raises `EndedBySignal` inside the block at the first of the signals of `ENDING`. Main thread only.

    Further ones are ignored until the block has ended; then the earlier handlers are back.
    """
    before = {ending: signal.signal(ending, _leave) for ending in ENDING}
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)


_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), <linux/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, so that no rank outlives the command that started it.

    Ends this process at once, with status 1, if the parent has died already.

    Args:
        parent: Process ID of the parent, read before the fork.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
