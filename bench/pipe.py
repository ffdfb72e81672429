"""Standard output: a pipe whose reader may stop early, such as `| head`, a disk that is full, or nothing at all."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

OUTPUT_LOST = 120
"""Exit status where standard output took not all: no command means a finding by it, and Python, which writes the rest
when it ends, has it for this. Source: the Python documentation of `sys.exit`."""


class OutputLost(Exception):
    """Standard output did not take all that was printed; what is printed from here on goes nowhere."""


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
    """Brackets printing alone: `| head` is no error, and the exit status stays what was found out.

    Raises:
        OutputLost: A disk is full, for example.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        print_nowhere(sys.stdout)
    except OSError as error:
        print_nowhere(sys.stdout)
        raise OutputLost(f"cannot write to standard output: {error.strerror or error}") from error


def status_of(body: Callable[[], int]) -> int:
    """Runs all that a process does; where it cannot print, that is one line on stderr.

    Args:
        body: Returns the exit status.

    Returns:
        That status, or `OUTPUT_LOST`.
    """
    try:
        if sys.stdout is None:
            raise OutputLost("standard output is closed; send it to /dev/null where nobody is to read it")
        try:
            status = body()
        except SystemExit:  # argparse's, after --help
            with reader_may_leave():
                pass
            raise
        with reader_may_leave():
            pass
    except OutputLost as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return OUTPUT_LOST
    return status
