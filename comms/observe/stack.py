"""Where a thread stands, in the words of whoever wrote the training script."""

import gc
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType

import torch

COMMS, PYTHON = Path(__file__).resolve().parents[1], Path(threading.__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent

_collection = threading.Lock()
"""Held by the thread that has turned garbage collection off."""


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither torch's, Python's own nor ours.

    Args:
        file: As a code object names it.
    """
    path = Path(file)
    return path.exists() and not any(path.resolve().is_relative_to(folder) for folder in (COMMS, PYTHON, TORCH))


def line_of(frame: FrameType | None) -> str | None:
    """The innermost line of a stack that is the user's own, else the innermost one: `train.py:88 in load`.

    Args:
        frame: The innermost one; None gives None.
    """
    innermost = frame
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return None
    return line_in_words(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def line_in_words(file: str, number: int, function: str) -> str:
    """`train.py:88 in load`."""
    return f"{Path(file).name}:{number} in {function}"


def line_of_thread(thread: int) -> str | None:
    """`line_of` for a running thread; None where it has ended.

    Args:
        thread: As `threading.get_ident` numbers it.
    """
    return line_of(frame_of(thread))


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a running thread; None where it has ended.

    Python lists the frames under a lock that every thread needs to begin and to end. Before 3.11.9 garbage is collected
    in between, and a finalizer that joins a thread, such as a data loader's, then waits for ever with the lock held
    (https://github.com/python/cpython/issues/106883). There nothing is collected meanwhile.

    Args:
        thread: As `threading.get_ident` numbers it.
    """
    if sys.version_info >= (3, 11, 9):
        return sys._current_frames().get(thread)
    with _collection:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()
