"""A study's command line."""

import argparse
from collections.abc import Iterable

from gradwire.bench.arguments import CommandParser
from gradwire.bench.emulation.paths import PathOptions


class StudyParser(CommandParser):
    """Parses a study's command line; its help begins with the module's docstring.

    Args:
        module: Name of the study's module below gradwire.bench.studies.
        doc: Docstring of the module.
    """

    def __init__(self, module: str, doc: str | None) -> None:
        super().__init__(
            prog=f"python -m gradwire.bench.studies.{module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_names(self, what: str, known: Iterable[str]) -> None:
        """Adds positional words, each of which has to be one of `known`; none of them stands for all.

        Args:
            what: Kind of the words, in the singular; the attribute is its plural with `s`.
            known: Allowed words.
        """
        names = ", ".join(known)

        def one_of_them(word: str) -> str:
            if word not in names.split(", "):
                raise argparse.ArgumentTypeError(f"found {word!r}, wanted one of {names}")
            return word

        text = f"of {names} (default: all)"
        self.add_argument(f"{what}s", nargs="*", metavar=what.upper(), type=one_of_them, help=text)

    def add_path(self) -> None:
        """Adds the options `--delay` and `--loss` of the path between nodes, see `path_of` and `path_words`."""
        self.add_argument("--delay", help="one way, between the nodes: 40ms")
        self.add_argument("--loss", help="of the packets that a node sends: 0.1%%")


def path_of(options: argparse.Namespace) -> PathOptions:
    """Returns the delay and loss between the nodes, from the options of a parser with `add_path`."""
    return PathOptions(delay=options.delay, loss=options.loss)


def path_words(options: argparse.Namespace) -> str:
    """Returns delay and loss for a title: `, 40ms one way, 0.1% loss`; empty if neither is set."""
    if not options.delay and not options.loss:
        return ""
    return f", {options.delay or 'no delay'} one way, {options.loss or 'no'} loss"
