"""Ctrl-C, SIGTERM and SIGHUP end a program through its `finally` blocks, so that it cleans up."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: a second signal must not cut the cleaning up short.
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(128 + number)


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Turns the first ending signal inside the block into SystemExit with 128 + signal; the main thread only."""
    before = {ending: signal.signal(ending, _leave) for ending in ENDING}
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
