"""Whose line a call comes from, where torch, Python and gradwire lie between; and warnings that name the user's."""

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
"""All of gradwire: in a checkout the package links to most of its folders."""
_PROGRAMS = tuple((_PACKAGE / name).resolve() for name in ("bench", "cli"))
"""Those of gradwire's folders that call the others, as a training script does."""


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor Python's own nor gradwire's; its programs are scripts like any other.

    Args:
        file: As a code object names it.
    """
    path = Path(file)
    return path.exists() and not _is_in(path, _libraries()) and (not _is_in(path, _OURS) or _is_in(path, _PROGRAMS))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a stack that is the user's own; None where none is.

    Args:
        frame: The innermost one; None gives None.
    """
    return next((each for each in _outwards(frame) if is_users(each.f_code.co_filename)), None)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's script from which gradwire was called.

    If no frame of this thread is the user's, the warning points at the thread's outermost frame. Since Python 3.12
    `warnings.warn(skip_file_prefixes=...)` does the same.

    Args:
        text: What is wrong and what to do; `gradwire: ` is put before it.
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
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in folders)


@cache
def _libraries() -> tuple[Path, ...]:
    """Python's own folder and torch's, which commands do without."""
    torch = importlib.util.find_spec("torch")
    files = (threading.__file__, None if torch is None else torch.origin)
    return tuple(Path(file).resolve().parent for file in files if file is not None)
