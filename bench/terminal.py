"""What every command shares in talking: progress on a terminal, plain text of any width in a pipe, JSON on request.

Progress goes to stderr, so that stdout holds the result alone: a bar or a line that is written over on a terminal, and
plain lines now and then elsewhere, from commands that take minutes.
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
"""What `--json` without a file stands for."""


class CleanConsole(Console):
    """rich's, without the escape sequences that names and files bring along; its own styles stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yields what is printed, piece by piece."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; see `reader_may_leave`."""
        with nullcontext() if self.stderr else reader_may_leave():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Goes on where rich would end the process with status 1: a reader that leaves changes nothing found out."""
        print_nowhere(self.file)


def complain(command: str, error: object) -> None:
    """Says on stderr what went wrong.

    Args:
        command: Who says it: `compare`.
        error: An exception, or words.
    """
    print(f"gradwire {command}: {printable(str(error))}", file=sys.stderr, flush=True)


def fitting_width(unlimited: int | None = None) -> int:
    """Columns that output has: COLUMNS, else those of the terminal, else 80.

    Args:
        unlimited: Where neither says, in place of 80: for lines that a reader in a pipe wants in one piece.
    """
    return shutil.get_terminal_size((unlimited or 80, 24)).columns


class _Count(ProgressColumn):
    """The steps done of all steps, `3/24`; empty for a task whose number of steps is not known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:g}/{task.total:g}")


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a bar with counts and elapsed time, drawn by a thread, until the block ends.

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
    """Says what the block does, for how long already, while it lasts.

    Args:
        what: For example `starting 4 nodes`.
        shown: As for `progress_bar`.

    Yields:
        A function that replaces `what`, to be called as the block goes on.
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
    """Lines on stderr where it is no terminal, so that who reads a pipe or a log sees that a long command goes on.

    Args:
        shown: As for `progress_bar`; never shown where stderr is a terminal, which has a bar.
        every_seconds: That lie between two lines, but for those that must not wait.
    """

    def __init__(self, shown: bool = True, every_seconds: float = 15.0) -> None:
        self._shown = shown and not sys.stderr.isatty()
        self._every_seconds = every_seconds
        self._began = time.monotonic()
        self._last = -math.inf

    def say(self, text: str, *, at_once: bool = False) -> None:
        """Writes a line with the seconds since this object was made, unless one was written just before.

        Args:
            text: Of the line.
            at_once: It must not wait.
        """
        now = time.monotonic()
        if self._shown and (at_once or now >= self._last + self._every_seconds):
            self._last = now
            print(f"{printable(text)}  ({now - self._began:.0f} s)", file=sys.stderr, flush=True)


class StatusLine:
    """One line on a terminal that is written over, for commands that measure: no thread of it runs beside them.

    Args:
        shown: As for `progress_bar`.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._began = time.monotonic()

    def show(self, text: str) -> None:
        """Writes the line anew, with the time since this object was made."""
        if self._shown:
            minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
            line = f"{text}  {minutes}:{seconds:02}"[: fitting_width() - 1]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Wipes the line, before anything else is printed and at the end."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def right_columns(*headings: str) -> list[Column]:
    """Columns of a table for figures, which end below each other; those of names are given by their headings alone."""
    return [Column(heading, justify="right") for heading in headings]


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Brackets the writing of a result.

    Args:
        option: That named the file: `--json`.
        path: The file.

    Raises:
        RuntimeError: In place of OSError, with both in it.
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"`{option}`: cannot write {path}: {error.strerror or error}") from error


JSON_HELP = "print JSON instead of tables; with FILE the tables stay, and the JSON goes there"


def add_json_option(parser: argparse.ArgumentParser, text: str = JSON_HELP) -> None:
    """Adds `--json [FILE]`: None without it, `STDOUT` without a file.

    Args:
        parser: Changed in place.
        text: Of its help.
    """
    parser.add_argument("--json", type=Path, nargs="?", const=STDOUT, metavar="FILE", help=text)


def write_json(target: Path | None, record: object) -> None:
    """Prints a record or writes it to a file, as `--json` asks.

    Args:
        target: What `--json` gave; None writes nothing.
        record: Of what JSON knows; a NaN or an infinity, which it does not know, becomes null.

    Raises:
        RuntimeError: The file cannot be written, although it could when the command began: a disk is full.
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
