"""Replaces files atomically: a reader sees the old content or the new one, never a part.

The bytes are written to a temporary file in the same folder, synced, and renamed over the old file; then the folder is
synced. A full disk, a limit, a kill or a power cut at any moment leaves the old file or the new one. A process that is
killed while it writes leaves `.NAME.PID.part` behind, which can be deleted.

Source: POSIX rename(); fsync(2) on folders; "All File Systems Are Not Created Equal" (OSDI 2014) on what a rename
without fsync may lose.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, lasting: bool = True) -> None:
    """Replaces a file atomically, or creates it: a reader sees the old content or the new one, never a part.

    The file keeps its permissions; a new one gets those of any new file. A pipe or a device is not replaced but written
    to directly, and not synced.

    Args:
        path: The file, in an existing folder. A symbolic link is followed: it stays, and its target is replaced.
        write: Function that writes the content to the open binary file that it is called with.
        lasting: True syncs to disk, so that the content survives a power cut. Not needed for files that are rewritten
            often.

    Raises:
        OSError: The file cannot be written. The old file is unchanged and no temporary file is left; but if only the
            folder cannot be synced, the file has been replaced.
        Exception: `write` raised it. The old file is unchanged and no temporary file is left.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            write(file)
        return
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")  # a name has 255 bytes at most
    try:
        with beside.open("wb") as file:
            with contextlib.suppress(FileNotFoundError):  # a new file has the permissions that `open` gives
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            write(file)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if lasting:
        _sync_folder(path.parent)


def replace_text(path: Path, text: str, *, lasting: bool = True) -> None:
    """Replaces a file with a text in UTF-8, or creates it; see `replace_file`."""
    replace_file(path, lambda file: file.write(text.encode()), lasting=lasting)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder to disk, so that a rename in it survives a power cut, on file systems that can do it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no fsync of folders, and keep names safe by themselves
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EROFS):
            raise
    finally:
        os.close(descriptor)
