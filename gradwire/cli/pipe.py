"""Printing into a pipe whose reader may stop early, such as `| head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Brackets printing alone: `| head` is no error, and the exit status stays what was found out.

    What is left unprinted goes nowhere, or Python would complain about it when it ends.
    """
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
