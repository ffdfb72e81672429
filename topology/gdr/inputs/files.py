"""The files that checks read, below one root: capped, loop-safe, remembered so that they can be captured."""

import os
import re
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal

State = Literal["present", "absent", "unreadable"]

_PAGE_NBYTES = 4096
_SEARCH_NBYTES = 1 << 20
_MAX_NAMES = 4096
_MAX_MATCHES = 100_000


class Files:
    """Reads files below a root folder without ever raising, and remembers exactly what was read.

    Paths are relative to the root, without a leading slash. A path that leaves the root (through a symbolic link)
    counts as unreadable.
    """

    def __init__(self, root: Path, denied: frozenset[str] = frozenset()) -> None:
        """Starts with nothing read.

        Args:
            root: `/` or the top of a captured tree.
            denied: Paths that were unreadable where the tree was captured.
        """
        self.root = root
        self.base = root.resolve()
        self.denied = denied
        self.contents: dict[str, dict[str, list[str]]] = {}
        """Path -> pattern -> what matched; pattern "" is the whole text."""
        self.present: set[str] = set()
        self.links: dict[str, str] = {}
        self.unreadable: set[str] = set()

    def _resolve(self, path: str) -> Path | None:
        if path in self.denied:
            self.unreadable.add(path)
            return None
        try:
            place = (self.root / path).resolve(strict=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError):  # no permission, symlink loop, NUL in a name
            self.unreadable.add(path)
            return None
        if not place.is_relative_to(self.base):
            self.unreadable.add(path)
            return None
        return place

    def state(self, path: str) -> State:
        """Returns whether a path is present, absent or unreadable for this user."""
        if self._resolve(path) is not None:
            self.present.add(path)
            return "present"
        return "unreadable" if path in self.unreadable else "absent"

    def _read(self, path: str, nbytes: int) -> str | None:
        place = self._resolve(path)
        if place is None:
            return None
        with suppress(OSError):
            handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    return _read_up_to(handle, nbytes).decode("utf-8", "replace")
            finally:
                os.close(handle)
        self.unreadable.add(path)
        return None

    def text(self, path: str) -> str | None:
        """Returns the first 4096 bytes of a file without surrounding blanks; None if it is absent or unreadable."""
        content = self._read(path, _PAGE_NBYTES)
        if content is None:
            return None
        content = content.strip("\0 \n\t\r")
        self.contents[path] = {"": [content]}
        return content

    def find(self, path: str, pattern: str) -> list[str] | None:
        """Returns all matches of a pattern in the first MiB of a file; only these are remembered for a capture.

        Args:
            path: Path relative to the root.
            pattern: Regular expression; `^` and `$` match at lines. It must match its own matches again, as a capture
                holds nothing else.

        Returns:
            The matches, or None if the file is absent or unreadable.
        """
        content = self._read(path, _SEARCH_NBYTES)
        if content is None:
            return None
        matches = [match[0] for match in islice(re.finditer(pattern, content, re.MULTILINE), _MAX_MATCHES)]
        self.contents.setdefault(path, {})[pattern] = matches
        return matches

    def names(self, path: str) -> tuple[str, ...] | None:
        """Returns the sorted names in a folder, the first 4096 at most; None if it is absent or cannot be listed."""
        place = self._resolve(path)
        if place is None:
            return None
        try:
            names = tuple(sorted(entry.name for entry in place.iterdir())[:_MAX_NAMES])
        except OSError:
            self.unreadable.add(path)
            return None
        self.present.update([path, *(f"{path}/{name}" for name in names)])
        return names

    def target(self, path: str) -> str | None:
        """Follows all links of a path; returns its end relative to the root, or None if it leads nowhere or outside."""
        place = self._resolve(path)
        if place is None:
            return None
        self.links[path] = str(place.relative_to(self.base))
        self.present.add(self.links[path])  # or the link would lead nowhere in a capture
        return self.links[path]


def _read_up_to(handle: int, nbytes: int) -> bytes:
    """Reads `nbytes` bytes, or fewer at the end of the file; files of /proc come in pieces."""
    pieces: list[bytes] = []
    while nbytes > 0 and (piece := os.read(handle, nbytes)):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)
