"""Where a thread stands, in the words of whoever wrote the training script."""

import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType

import torch

COMMS, PYTHON = Path(__file__).resolve().parents[1], Path(threading.__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent


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
    return line_of(sys._current_frames().get(thread))
