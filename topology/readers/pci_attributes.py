"""Attributes of one device folder of sysfs: small, capped reads that cannot block, loop or leave the folder."""

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire.topology.readers.pci_config import ConfigSpace, decode

BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_PAGE_NBYTES = 4096  # a sysfs attribute never exceeds a page
_MAX_CHILDREN = 256
_SAFE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no symlink, no waiting for a fifo's writer


class Attributes:
    """The attributes of one device, each opened at most once, relative to the folder's handle."""

    def __init__(self, handle: int, present: Collection[str]) -> None:
        """Args are the open folder and the names in it."""
        self._handle = handle
        self._present = present
        self.unreadable: list[str] = []

    def text(self, name: str) -> str | None:
        """The attribute without its newline; None when it is absent or unreadable."""
        with self._opened(name) as file:
            if file is None:
                return None
            try:
                return os.read(file, _PAGE_NBYTES).decode("ascii", "replace").strip("\0 \n\t\r")
            except OSError:  # some attributes exist and refuse, a GPU that fell off the bus for one
                self.unreadable.append(name)
                return None

    def number(self, name: str) -> int | None:
        """The attribute as a number, decimal or 0x; None when it is none."""
        return integer(self.text(name))

    def link(self, name: str) -> str | None:
        """Last component of a symbolic link's target."""
        if name not in self._present:
            return None
        try:
            return os.readlink(name, dir_fd=self._handle).rstrip("/").rpartition("/")[2] or None
        except OSError:
            return None

    def config(self) -> ConfigSpace | None:
        """The decoded configuration space, read a few bytes at a time."""
        with self._opened("config") as file:
            if file is None:
                return None
            try:
                return decode(lambda offset, nbytes: os.pread(file, nbytes, offset))
            except OSError:
                self.unreadable.append("config")
                return None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        file = None
        if name in self._present:
            try:
                file = os.open(name, _SAFE, dir_fd=self._handle)
            except OSError:
                self.unreadable.append(name)
        if file is None:
            yield None
            return
        try:
            regular = stat.S_ISREG(os.fstat(file).st_mode)
            if not regular:
                self.unreadable.append(name)
            yield file if regular else None
        finally:
            os.close(file)


def integer(text: str | None) -> int | None:
    """A decimal, or hexadecimal with 0x, of at most 18 characters; None for anything else."""
    if text is None or not re.fullmatch(r"-?[0-9]{1,18}|0[xX][0-9a-fA-F]{1,16}", text):
        return None
    return int(text, 16) if text[:2].lower() == "0x" else int(text)


def gigatransfers(text: str | None) -> float | None:
    """GT/s of `16.0 GT/s PCIe`; None for `Unknown` and other texts."""
    match = re.match(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?GT/s", text or "")
    return float(match[1]) if match else None


def bus_id(text: str | None) -> str | None:
    """The text if it is a bus id."""
    return text if text is not None and BUS_ID.fullmatch(text) else None


def bar_nbytes(text: str | None) -> tuple[int, ...]:
    """Sizes of base address registers 0 to 5 from the attribute `resource` (start, end, flags per line)."""
    sizes = []
    for line in (text or "").splitlines()[:6]:
        words = [integer(word) for word in line.split()]
        start, end = words[:2] if len(words) >= 2 else (None, None)
        sizes.append(end - start + 1 if start is not None and end is not None and end > start else 0)
    return tuple(sizes)


def parents(folder: Path, base: Path) -> tuple[str, ...] | None:
    """Bus ids of the folders above a device, nearest first; None where the folder is not inside a host bridge's."""
    chain = []
    for part in reversed(folder.relative_to(base).parts[:-1]):
        if BUS_ID.fullmatch(part):
            chain.append(part)
        else:
            return tuple(chain) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part) or chain else None
    return None


def children(folder: Path) -> tuple[str, ...]:
    """Names in a folder, sorted; none when it cannot be listed."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir())[:_MAX_CHILDREN])
    except OSError:
        return ()
