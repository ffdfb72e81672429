"""What every command shares in listening: a parser, bounds of numbers, places to write to, all checked beforehand."""

import argparse
import importlib
import importlib.util
import math
import os
import re
import stat
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from gradwire.bench.terminal import STDOUT
from gradwire.topology.errors import TopologyError
from gradwire.topology.printable import printable
from gradwire.topology.readers.files import MAX_NBYTES, read_text

MOST_SECONDS = 366 * 86_400
"""A year: nobody waits longer, and torch counts time-outs in milliseconds of 64 bits."""


class CommandParser(argparse.ArgumentParser):
    """argparse's parser with the commands' own form of errors, without escape sequences."""

    def error(self, message: str) -> NoReturn:
        """Print what went wrong and end with status 2."""
        self.exit(2, f"{self.prog}: {printable(in_one_form(message))}\n")

    def parse_naming(self, argv: Sequence[str], option: str) -> argparse.Namespace:
        """Parses the words of a command that takes a file by an option alone; ends with status 2 where it cannot.

        Args:
            argv: The words behind the command.
            option: Which one that is; who gives the file without it is told: `--from`.
        """
        options, left = self.parse_known_args(argv)
        if files := [word for word in left if not word.startswith("-")]:
            self.error(f"`{option}`: found {files[0]} without it; wanted `{self.prog} {option} {files[0]}`")
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return options


def in_one_form(message: str) -> str:
    """Return an error message of argparse in the form of all others: `--model`: found 'gpt', wanted one of gpt2, ...

    Args:
        message: As `ArgumentParser.error` is given it, in English; what it does not recognize stays as it is.
    """
    if (unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)) is not None:
        return f"`{unknown[1]}`: found an unknown option, wanted one of those that --help lists"
    if (found := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL)) is None:
        return message
    option = found[1]
    if (choice := re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", found[2], re.DOTALL)) is None:
        return f"`{option}`: {found[2]}"
    known = choice[2].replace("'", "").split(", ")
    near = get_close_matches(choice[1], known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"`{option}`: found {choice[1]!r}, wanted one of {', '.join(known)}{hint}"


def add_import_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds `--import MODULE`, for codecs of the user's own.

    Args:
        parser: A command's, or a group of it.
    """
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, where it registers codecs of yours; repeatable",
    )


def import_modules(names: Sequence[str]) -> None:
    """Imports what `--import` names, from the current folder as well.

    Args:
        names: Of modules, as Python's `import` takes them.

    Raises:
        ValueError: One of them does not exist, or raises.
    """
    if names and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(
                f"`--import` {name}: {type(error).__name__}: {error}; wanted a module in the current folder or on "
                "PYTHONPATH that can be imported"
            ) from error


def check_number(option: str, value: float | None, least: float, most: float) -> None:
    """Refuse a number out of range; None passes.

    Args:
        option: As the user wrote it: `--nodes`.
        value: What argparse made of it; NaN is in no range.
        least: The smallest that makes sense.
        most: The largest.

    Raises:
        ValueError: It is out of range.
    """
    if value is not None and not least <= value <= most:
        raise ValueError(f"`{option}`: found {_short(value)}, wanted {_short(least)} to {_short(most)}")


def _short(value: float) -> str:
    """Whole numbers in full, as far as a reader can tell them apart."""
    if isinstance(value, int) or (math.isfinite(value) and value == round(value)):
        return f"{value:.0f}" if abs(value) < 10**15 else f"{value:.1e}" if abs(value) < 1e300 else "too large to write"
    return f"{value:g}"


def memory_nbytes() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(option: str, nbytes: float, what: str) -> None:
    """Refuses what cannot fit into this machine's memory.

    Args:
        option: The one to make smaller.
        nbytes: What is needed at least.
        what: What for.

    Raises:
        ValueError: This machine has less.
    """
    if nbytes > memory_nbytes():
        raise ValueError(
            f"`{option}`: {what} need at least {nbytes / 1e9:.3g} GB, this machine has {memory_nbytes() / 1e9:.3g}; "
            "wanted less"
        )


def check_output(option: str, path: Path | None) -> None:
    """Opens a file for writing and closes it, so that nothing is measured in vain.

    What is in it stays, and a file that was not there is not there afterwards.

    Args:
        option: As the user wrote it: `--json`.
        path: Where the command will write; None and `STDOUT` pass.

    Raises:
        ValueError: Nothing can be written there.
    """
    if path is None or path == STDOUT:
        return
    try:
        if not path.exists():
            with path.open("xb"):
                pass
            path.unlink()
        elif stat.S_ISREG(path.stat().st_mode) or path.is_dir():
            with path.open("ab"):
                pass
        elif not os.access(path, os.W_OK):  # a pipe is not opened: that waits for its reader
            raise PermissionError(None, "no permission to write")
    except (OSError, ValueError) as error:  # ValueError: NUL in a name
        raise ValueError(f"`{option}`: cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def check_picture(option: str, path: Path) -> None:
    """Makes sure that a name is one of a picture.

    Raises:
        ValueError: It ends in something else.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"`{option}`: found {path}, wanted a name that ends in .png or .svg")


def check_can_plot(option: str) -> None:
    """Makes sure that a picture can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"`{option}` needs matplotlib: install it with `pip install matplotlib`")


def read_input(option: str, path: Path, most_nbytes: int = MAX_NBYTES) -> str:
    """The text of a regular file of sensible size.

    Args:
        option: As the user wrote it.
        path: Which file.
        most_nbytes: The largest that is read.

    Raises:
        ValueError: It cannot be read, is too large, or is no text.
    """
    try:
        return read_text(path, most_nbytes)
    except TopologyError as error:
        raise ValueError(f"`{option}` {error}") from None
