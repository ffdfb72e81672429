"""Lines of the training script in which threads are, read from their stacks."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from gradwire.compressors.callers import users_frame

TORCH = Path(torch.__file__).resolve().parent

_collection = threading.Lock()
"""Guards the switch of the garbage collector: only one thread at a time turns it off and on again."""


def line_of(frame: FrameType | None) -> str | None:
    """Returns the innermost line of a stack that is the user's own, else the innermost one: `train.py:88 in load`.

    Args:
        frame: Innermost frame of the stack; None gives None.
    """
    frame = users_frame(frame) or frame
    if frame is None:
        return None
    return line_in_words(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def line_in_words(file: str, number: int, function: str) -> str:
    """Returns a line of code as text, `train.py:88 in load`.

    Args:
        file: Path of the file, of which the name is kept.
        number: Number of the line.
        function: Name of the function.
    """
    return f"{Path(file).name}:{number} in {function}"


def line_of_thread(thread: int) -> str | None:
    """Returns `line_of` the present stack of a thread; None if the thread has ended.

    Args:
        thread: Number of the thread by `threading.get_ident`.
    """
    return line_of(frame_of(thread))


def frame_of(thread: int) -> FrameType | None:
    """Returns the innermost frame of a running thread; None if it has ended.

    Python lists the frames under a lock that every thread needs to begin and to end. Before 3.11.9 it may collect
    garbage while it holds the lock. A finalizer that joins a thread, such as a data loader's, then waits forever
    (https://github.com/python/cpython/issues/106883). So the garbage collector is turned off meanwhile.

    Args:
        thread: Number of the thread by `threading.get_ident`.
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
