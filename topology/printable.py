"""Text from elsewhere, fit for a terminal: names of files, and what stands in them, may hold escape sequences."""

import re

_NOT_PRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line feed and tab, what turns the direction of writing, and halves of surrogate pairs, which
stand for the bytes of a name that are no UTF-8. Source: Unicode 15, section 23.1 and 23.2; PEP 383."""


def printable(text: str) -> str:
    r"""Returns a text in which each such character is written as Python would: `\x1b`.

    Args:
        text: Any, of one line or more.
    """
    return _NOT_PRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, most: int = 240) -> str:
    """Returns a quotation that is cut at a blank and marked with `...` where it is too long.

    A cut inside a number would show another number.

    Args:
        text: What is quoted.
        most: Characters that are kept.
    """
    if len(text) <= most:
        return text
    return f"{text[:most].rpartition(' ')[0] or text[:most]} ..."
