"""Handling of a standard output that takes no more: a pipe whose reader has ended (`| head`), or a full disk."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

OUTPUT_LOST = 120
"""Exit status if standard output did not take all that was printed. Python uses the same number if it cannot flush its
output at exit, and no command uses it for a finding. Source: the Python documentation of `sys.exit`."""


class OutputLost(Exception):
    """Error of a standard output that did not take all that was printed; later output is discarded."""


def print_nowhere(stream: IO[str]) -> None:
    """Redirects a stream to /dev/null, so that Python reports no error for unwritten output at exit.

    Args:
        stream: Stream whose reader has closed its end, or that cannot be written.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Context for code that only prints: a reader that has ended, as of `| head`, is no error there.

    Raises:
        OutputLost: The output cannot be written for another reason, such as a full disk.
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
    """Runs a function that prints, and reports on stderr if standard output does not take all of it.

    Args:
        body: Function that does all the work of a process, and returns its exit status.

    Returns:
        The status of `body`; `OUTPUT_LOST` if output was lost, or standard output is closed.
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
