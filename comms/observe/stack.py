"""Where a thread stands, in the words of whoever wrote the training script."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from gradwire.compressors.callers import users_frame

TORCH = Path(torch.__file__).resolve().parent

_collection = threading.Lock()
"""Held by the thread that has turned garbage collection off."""


def line_of(frame: FrameType | None) -> str | None:
    """The innermost line of a stack that is the user's own, else the innermost one: `train.py:88 in load`.

    Args:
        frame: The innermost one; None gives None.
    """
    frame = users_frame(frame) or frame
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
