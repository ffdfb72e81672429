"""Whether a test has left a segment in /dev/shm, while other tests of the same machine make segments of their own."""

import time
from pathlib import Path

SECONDS = 20.0
"""Segments live for milliseconds, until all ranks have mapped them; what is there after so long was left behind."""


def segments() -> set[Path]:
    """The segments of gradwire that are there now."""
    return set(Path("/dev/shm").glob("gradwire-*"))


def left_since(before: set[Path]) -> set[Path]:
    """Those that have come since `before` and stay."""
    left, deadline = segments() - before, time.monotonic() + SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= segments()
    return left
