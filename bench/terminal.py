"""Shared output of all commands: progress on a terminal, plain text of any width in a pipe, JSON on request.

Progress goes to stderr, so that stdout has the result only. On a terminal it is a bar, or a line that is overwritten;
elsewhere, commands that take minutes print a line from time to time.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from gradwire.bench.pipe import print_nowhere, reader_may_leave
from gradwire.comms.boundary.files import replace_text
from gradwire.topology.printable import printable

STDOUT = Path("-")
"""Value of `--json` without a file: the JSON goes to stdout."""


class CleanConsole(Console):
    """rich's Console without escape sequences in the printed text, such as in names of files; its styles remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yields the pieces of the printed text, with escape sequences replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints like rich's `print`; on stdout, a reader that has ended is no error (see `reader_may_leave`)."""
        with nullcontext() if self.stderr else reader_may_leave():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Discards later output, where rich would end the process with status 1: the command's own status counts."""
        print_nowhere(self.file)


def complain(command: str, error: object) -> None:
    """Prints an error on stderr, as a line that begins with `gradwire COMMAND:`.

    Args:
        command: Name of the command, such as `compare`.
        error: Exception or text to print.
    """
    print(f"gradwire {command}: {printable(str(error))}", file=sys.stderr, flush=True)


def fitting_width(unlimited: int | None = None) -> int:
    """Returns the width of the output in columns: COLUMNS, else that of the terminal, else `unlimited`.

    Args:
        unlimited: Width without COLUMNS and terminal, as in a pipe; None for 80.
    """
    return shutil.get_terminal_size((unlimited or 80, 24)).columns


class _Count(ProgressColumn):
    """Column with the finished steps of all steps, `3/24`; empty if the number of all steps is not known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:g}/{task.total:g}")


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Shows a bar with counts and elapsed time, drawn by a thread, until the block ends.

    Args:
        shown: Whether this rank shows it; it is never shown if stderr is no terminal.
    """
    with Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=24),
        _Count(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    ) as progress:
        yield progress


@contextmanager
def working(what: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows what the block does and for how long, on a terminal, until the block ends.

    Args:
        what: Words for what it does, for example `starting 4 nodes`.
        shown: Whether this rank shows it; it is never shown if stderr is no terminal.

    Yields:
        A function that replaces the words by others.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    with Progress(
        TextColumn("{task.description} ..."), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda now: progress.update(task, description=printable(now))


class PlainLines:
    """Progress of a long command as lines on stderr, for a pipe or a log.

    Args:
        shown: Whether this rank prints them; they are never printed on a terminal, which has a bar.
        every_seconds: Least seconds between two lines, except for urgent ones.
    """

    def __init__(self, shown: bool = True, every_seconds: float = 15.0) -> None:
        self._shown = shown and not sys.stderr.isatty()
        self._every_seconds = every_seconds
        self._began = time.monotonic()
        self._last = -math.inf

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Prints a line with the seconds since this object was made; drops it if the last line is too recent.

        Args:
            text: Text of the line.
            at_once: Whether it is printed in any case.
        """
        now = time.monotonic()
        if self._shown and (at_once or now >= self._last + self._every_seconds):
            self._last = now
            print(f"{printable(text)}  ({now - self._began:.0f} s)", file=sys.stderr, flush=True)


class StatusLine:
    """Line of progress on a terminal that each call overwrites; unlike `progress_bar` without a thread.

    Commands that measure use it, because a thread would disturb the measurement.

    Args:
        shown: Whether this rank shows it; it is never shown if stderr is no terminal.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._began = time.monotonic()

    def show(self, text: str) -> None:
        """Replaces the line by a text, with the time since this object was made."""
        if self._shown:
            minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
            line = f"{text}  {minutes}:{seconds:02}"[: fitting_width() - 1]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the line. Call it before anything else is printed, and at the end."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def right_columns(*headings: str) -> list[Column]:
    """Returns right-aligned columns of a table, for numbers.

    Args:
        headings: Heading of each column.
    """
    return [Column(heading, justify="right") for heading in headings]


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Context for writing a file of results: turns an OSError into an error that names the option and the file.

    Args:
        option: Name of the option that gave the file, such as `--json`.
        path: File to write.

    Raises:
        RuntimeError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"`{option}`: cannot write {path}: {error.strerror or error}") from error


JSON_HELP = "print JSON instead of tables; with FILE the tables stay, and the JSON goes there"


def add_json_option(parser: argparse.ArgumentParser, text: str = JSON_HELP) -> None:
    """Adds `--json [FILE]`, whose value is None if it is not given, and `STDOUT` without a file.

    Args:
        parser: Parser of a command; the option is added in place.
        text: Help of the option.
    """
    parser.add_argument("--json", type=Path, nargs="?", const=STDOUT, metavar="FILE", help=text)


def write_json(target: Path | None, record: object) -> None:
    """Writes a record as JSON to stdout or to a file, as `--json` asks.

    Args:
        target: Value of `--json`; None writes nothing.
        record: Value of types that JSON has; NaN and infinity become null.

    Raises:
        RuntimeError: The file cannot be written, for example because the disk is full.
    """
    text = json.dumps(_finite(record), indent=2) + "\n"
    if target == STDOUT:
        with reader_may_leave():
            sys.stdout.write(text)
    elif target is not None:
        with writing("--json", target):
            replace_text(target, text)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
