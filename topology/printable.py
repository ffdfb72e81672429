"""Text from elsewhere, fit for a terminal: names of files, and what stands in them, may hold escape sequences."""

import re

_NOT_PRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line feed and tab, what turns the direction of writing, and halves of surrogate pairs, which
stand for the bytes of a name that are no UTF-8. Source: Unicode 15, section 23.1 and 23.2; PEP 383."""


def printable(text: str) -> str:
    r"""Escapes control characters and others that could disturb a terminal, as Python writes them: `\x1b`.

    Args:
        text: Text of one line or more; line feeds and tabs are kept.
    """
    return _NOT_PRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, most: int = 240) -> str:
    """Cuts a long text at a blank and appends ` ...`; shorter texts are returned as they are.

    A cut inside a number would show another number.

    Args:
        text: Text to quote.
        most: Maximum number of characters that are kept.
    """
    if len(text) <= most:
        return text
    return f"{text[:most].rpartition(' ')[0] or text[:most]} ..."
