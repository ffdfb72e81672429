"""Finds the line of the user's script from which a call came through torch and gradwire, and warns with that line."""

import importlib.util
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parents[1]
_OURS = tuple(folder.resolve() for folder in (_PACKAGE, *_PACKAGE.iterdir()) if folder.is_dir())
"""Folders of gradwire, with links resolved: in a checkout the package links to most of them."""
_PROGRAMS = tuple((_PACKAGE / name).resolve() for name in ("bench", "cli"))
"""Folders of gradwire whose files count as the user's: programs that call gradwire as a training script does."""


@cache
def is_users(file: str) -> bool:
    """Returns whether a file is the user's: not torch's, Python's or gradwire's, except gradwire's own programs.

    Args:
        file: Path of an existing file, as in `co_filename`; anything else (`<string>`) returns False.
    """
    path = Path(file)
    return path.exists() and not _is_in(path, _libraries()) and (not _is_in(path, _OURS) or _is_in(path, _PROGRAMS))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of a stack that is the user's; None if there is none.

    Args:
        frame: Innermost frame of the stack; None for an empty stack.
    """
    return next((each for each in _outwards(frame) if is_users(each.f_code.co_filename)), None)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that points at the line of the user's script from which gradwire was called.

    If no frame of this thread is the user's, the warning points at the thread's outermost frame. Since Python 3.12
    `warnings.warn(skip_file_prefixes=...)` does the same.

    Args:
        text: Problem and remedy; gets the prefix `gradwire: ` unless it begins with `gradwire`.
        category: Class of the warning.
    """
    frames = [*_outwards(sys._getframe(1))]
    outside = (each for each in frames if not _is_in(Path(each.f_code.co_filename), _OURS))
    frame = next((each for each in outside if is_users(each.f_code.co_filename)), frames[-1])
    said = frame.f_globals.setdefault("__warningregistry__", {})
    name = str(frame.f_globals.get("__name__", "<unknown>"))
    text = text if text.startswith("gradwire") else f"gradwire: {text}"
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, name, said)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a stack from `frame` to the outermost one."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in folders)


@cache
def _libraries() -> tuple[Path, ...]:
    """Returns the folders of Python's standard library and of torch; without torch, which commands do not need, one."""
    torch = importlib.util.find_spec("torch")
    files = (threading.__file__, None if torch is None else torch.origin)
    return tuple(Path(file).resolve().parent for file in files if file is not None)
