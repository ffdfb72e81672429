"""Printing into a pipe whose reader may stop early, such as `| head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


def print_nowhere(stream: IO[str]) -> None:
    """Has what is left unprinted go nowhere, or Python would complain about it when it ends.

    Args:
        stream: Whose reader has left.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Brackets printing alone: `| head` is no error, and the exit status stays what was found out."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        print_nowhere(sys.stdout)
