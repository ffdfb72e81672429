"""How gradwire writes a file that somebody may need later: whole, or not at all.

The bytes go into a new file beside the old one, are brought to the disk, and take the old one's name in one move; then
the folder is brought to the disk, too. A full disk, a limit, a kill or a power cut at any moment leaves the old file or
the new one. Only a process that is killed while it writes leaves something beside: `.NAME.PID.part`, to be deleted.

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
    """Writes a file in place of the one that there may be.

    Args:
        path: The file; its folder is there. A symbolic link is followed. A pipe or a device, which holds nothing that
            could be lost, is written to as it is.
        write: Writes the content into the open file that it is given.
        lasting: Whether the content must survive a power cut; else the disk gets it when the system likes, which is
            enough for what is written again and again.

    Raises:
        OSError: It cannot be written; the old file is as it was, and nothing is left beside it.
        Exception: What `write` raises; likewise.
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
    """As `replace_file`, with a text in UTF-8."""
    replace_file(path, lambda file: file.write(text.encode()), lasting=lasting)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems have no fsync of folders, and keep names safe by themselves
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EROFS):
            raise
    finally:
        os.close(descriptor)
