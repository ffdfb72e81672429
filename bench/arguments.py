"""Shared input of all commands: a parser, and checks of numbers, files and modules before anything starts."""

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
"""Upper limit of options in seconds, about a year; torch's timeouts, in milliseconds of 64 bits, allow more."""


FORMS = {
    r"unrecognized arguments: (\S+).*": r"`\1`: found an unknown option, wanted one of those that --help lists",
    r"argument ([^:]+): invalid (?:int|float) value: (.*)": r"`\1`: found \2, wanted a number",
    r"the following arguments are required: (.*)": r"`\1`: found nothing, wanted a value",
}
"""Message of argparse (regular expression) -> the same in the form of all other errors, with its groups."""


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, with errors in the form of all commands' errors and without escape sequences."""

    def error(self, message: str) -> NoReturn:
        """Prints an error on stderr, and ends the process with status 2.

        Args:
            message: Message of argparse.
        """
        self.exit(2, f"{self.prog}: {printable(in_one_form(message))}\n")

    def parse_naming(self, argv: Sequence[str], option: str) -> argparse.Namespace:
        """Parses the words of a command that takes a file only by an option; exits with status 2 on an error.

        Args:
            argv: Words of the command line after the command.
            option: Option that takes the file, such as `--from`; the error about a file without it names it.
        """
        options, left = self.parse_known_args(argv)
        # A word behind an unknown option is that option's, not a file.
        if left and not left[0].startswith("-"):
            self.error(f"`{option}`: found {left[0]} without it; wanted `{self.prog} {option} {left[0]}`")
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return options


def in_one_form(message: str) -> str:
    """Returns an error message of argparse in the form of all others: `--model`: found 'gpt', wanted one of gpt2, ...

    Args:
        message: English message as argparse passes it to `ArgumentParser.error`; of an unknown form, it is returned
            unchanged.
    """
    for pattern, form in FORMS.items():
        if (known_form := re.fullmatch(pattern, message, re.DOTALL)) is not None:
            return known_form.expand(form)
    if (found := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL)) is None:
        return message
    option = found[1]
    # Python 3.15 has a suggestion of its own in the middle.
    form = r"invalid choice: '?(.*?)'?(?:, maybe you meant .*?)? \(choose from (.*)\)"
    if (choice := re.fullmatch(form, found[2], re.DOTALL)) is None:
        return f"`{option}`: {found[2]}"
    known = choice[2].replace("'", "").split(", ")
    hint = "".join(f"; did you mean {near}?" for near in get_close_matches(choice[1], known, 1))
    return f"`{option}`: found {choice[1]!r}, wanted one of {', '.join(known)}{hint}"


def add_import_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds `--import MODULE`, which imports modules that register codecs of the user's own.

    Args:
        parser: Parser of a command, or a group of its options; the option is added in place.
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
    """Imports the modules of `--import`; the current folder is added to sys.path for them.

    Args:
        names: Names of modules, as Python's `import` takes them.

    Raises:
        ValueError: A module does not exist, or raises an exception.
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
    """Checks that the number of an option is in range.

    Args:
        option: Name of the option, such as `--nodes`.
        value: Value of the option; None is always accepted, NaN never.
        least: Smallest accepted value.
        most: Largest accepted value.

    Raises:
        ValueError: The number is out of range.
    """
    if value is not None and not least <= value <= most:
        raise ValueError(f"`{option}`: found {_short(value)}, wanted {_short(least)} to {_short(most)}")


def _short(value: float) -> str:
    """Formats a number for an error message: whole numbers in full up to 15 digits, others by six digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == round(value)):
        return f"{value:.0f}" if abs(value) < 10**15 else f"{value:.1e}" if abs(value) < 1e300 else "too large to write"
    return f"{value:g}"


def memory_nbytes() -> int:
    """Returns the bytes of memory that this machine has in total."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(option: str, nbytes: float, what: str) -> None:
    """Checks that something fits into this machine's memory.

    Args:
        option: Name of the option that makes it smaller.
        nbytes: Least number of bytes that it needs.
        what: Words for what needs them, in the plural, for the error message.

    Raises:
        ValueError: This machine has less memory.
    """
    if nbytes > memory_nbytes():
        raise ValueError(
            f"`{option}`: {what} need at least {nbytes / 1e9:.3g} GB, this machine has {memory_nbytes() / 1e9:.3g}; "
            "wanted less"
        )


def check_output(option: str, path: Path | None) -> None:
    """Checks that a file can be written, before a measurement whose result would be lost otherwise.

    An existing file keeps its content, and a file that did not exist does not exist afterwards.

    Args:
        option: Name of the option, such as `--json`.
        path: File that the command will write; None and `STDOUT` are always accepted.

    Raises:
        ValueError: The file cannot be written.
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
    """Checks that the name of a file is one of a picture.

    Args:
        option: Name of the option, such as `--plot`.
        path: File that the command will write.

    Raises:
        ValueError: The name ends neither in .png nor in .svg.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"`{option}`: found {path}, wanted a name that ends in .png or .svg")


def check_can_plot(option: str) -> None:
    """Checks that matplotlib, which draws pictures, is installed.

    Args:
        option: Name of the option, such as `--plot`.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"`{option}` needs matplotlib: install it with `pip install matplotlib`")


def read_input(option: str, path: Path, most_nbytes: int = MAX_NBYTES) -> str:
    """Returns the text of a file that an option names.

    Args:
        option: Name of the option, such as `--replay`.
        path: File to read, which must be a regular one.
        most_nbytes: Largest size that is read, in bytes.

    Raises:
        ValueError: The file cannot be read, is too large, or is no text.
    """
    try:
        return read_text(path, most_nbytes)
    except TopologyError as error:
        raise ValueError(f"`{option}` {error}") from None
