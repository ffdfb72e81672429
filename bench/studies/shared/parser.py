"""A study's command line."""

import argparse
from collections.abc import Iterable

from gradwire.bench.emulation.paths import PathOptions


class StudyParser(argparse.ArgumentParser):
    """A study's parser, whose help begins with what the study says of itself.

    Args:
        module: The study's name below gradwire.bench.studies.
        doc: Its docstring.
    """

    def __init__(self, module: str, doc: str | None) -> None:
        super().__init__(
            prog=f"python -m gradwire.bench.studies.{module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_names(self, what: str, known: Iterable[str]) -> None:
        """Adds the words that come without an option: some of `known`, all of them if there are none.

        Args:
            what: Each of them is; the attribute is this with an s behind it.
            known: All that there are.
        """
        names = ", ".join(known)

        def one_of_them(word: str) -> str:
            if word not in names.split(", "):
                raise argparse.ArgumentTypeError(f"`{what.upper()}` is {word!r}; wanted one of {names}")
            return word

        text = f"of {names} (default: all)"
        self.add_argument(f"{what}s", nargs="*", metavar=what.upper(), type=one_of_them, help=text)

    def add_path(self) -> None:
        """Adds what lies between the nodes: see `path_of` and `path_words`."""
        self.add_argument("--delay", help="one way, between the nodes: 40ms")
        self.add_argument("--loss", help="of the packets that a node sends: 0.1%%")


def path_of(options: argparse.Namespace) -> PathOptions:
    """What lies between the nodes, of a parser with `add_path`."""
    return PathOptions(delay=options.delay, loss=options.loss)


def path_words(options: argparse.Namespace) -> str:
    """The same, for a title: `, 40ms one way, 0.1% loss`; empty where nothing lies there."""
    if not options.delay and not options.loss:
        return ""
    return f", {options.delay or 'no delay'} one way, {options.loss or 'no'} loss"
