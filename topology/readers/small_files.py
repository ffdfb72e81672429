"""Reading the small files and folders of sysfs and procfs without ever failing, hanging or reading too much."""

import os
import re
import stat
from pathlib import Path

MAX_NBYTES = 65_536
"""sysfs gives at most a page per file; of /proc/cpuinfo the first processors are enough."""
MAX_NAMES = 65_536


def text_of(path: Path) -> str | None:
    """Returns a file's text without surrounding blanks, or None where it is absent, empty or unreadable.

    Args:
        path: A regular file; anything else (a pipe, a folder) counts as unreadable.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return os.read(handle, MAX_NBYTES).decode("utf-8", "replace").strip("\0 \t\r\n") or None
    except OSError:
        return None
    finally:
        os.close(handle)


def number_of(path: Path) -> int | None:
    """Returns a file's content as an integer, or None where it is none.

    Args:
        path: A file such as `speed` or `numa_node`.
    """
    text = text_of(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


def names_in(folder: Path) -> list[str]:
    """Returns the sorted names in a folder; none where it cannot be listed.

    Args:
        folder: The folder.
    """
    try:
        return sorted(os.listdir(folder))[:MAX_NAMES]  # noqa: PTH208  # names are wanted, not Path objects
    except OSError:
        return []


def link_name(path: Path) -> str | None:
    """Returns the last component of a symbolic link's target, or None where it is no link.

    Args:
        path: A link such as `device/driver`.
    """
    try:
        return path.readlink().name or None
    except OSError:
        return None


def real_path(path: Path) -> Path | None:
    """Returns where a path leads, or None for a dangling link or a loop.

    Args:
        path: A path with symbolic links in it.
    """
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop, before Python 3.13
        return None
