"""A page's tables, made from CSV files.

A page says where a table belongs, and which columns of the file it shows; without a word, all of them:

    <!-- data: steps.csv, columns 1, 8-12 -->

    <!-- /data -->

The first line of a file names the columns; a cell is Markdown, as the page shows it.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

_PLACE = re.compile(
    r"^<!-- data: (?P<file>[\w-]+\.csv)(?:, columns (?P<columns>[\d, -]+?))? -->\n(?P<table>.*?)^<!-- /data -->$",
    re.MULTILINE | re.DOTALL,
)
_OPENED = re.compile(r"^<!-- data:", re.MULTILINE)
_NUMBER = re.compile(r"^[*<]*[+-]?\d[\d,.]*(e[+-]\d+)?[!%*x]*$|^-?$|^never$")
"""Cells of a column of numbers, which is written flush right; the text on a page may add a unit or a mark."""

Rows = Sequence[Sequence[str]]


def with_tables(page: str, folder: Path) -> str:
    """Returns a page with its tables made from CSV files.

    Args:
        page: Text of the page in Markdown.
        folder: Folder with the page's CSV files.

    Raises:
        ValueError: A table's mark has another form, or its file is missing, empty or has rows of unequal lengths.
    """
    if len(_OPENED.findall(page)) != len(_PLACE.findall(page)):
        raise ValueError("a place of a table is not `<!-- data: FILE.csv -->` or `..., columns 1, 3-5 -->` to `/data`")

    def place(found: re.Match[str]) -> str:
        rows = read(folder / found["file"])
        if found["columns"]:
            shown = _columns(found["columns"], len(rows[0]), found["file"])
            rows = [[row[column] for column in shown] for row in rows]
        opening = found[0].partition("\n")[0]
        return f"{opening}\n\n{markdown(rows)}\n\n<!-- /data -->"

    return _PLACE.sub(place, page)


def put_between(page: str, text: str, first: str, last: str) -> str:
    """Returns a page with the text between two of its lines replaced.

    Args:
        page: Text of the page in Markdown.
        text: New text between the lines.
        first: Line before the text; kept.
        last: Line after the text; kept.

    Raises:
        ValueError: The page does not have both lines in this order.
    """
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no lines `{first}` and `{last}`; put them where the tables belong")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"


def files_of(page: str) -> set[str]:
    """Returns the names of the CSV files from which a page has tables.

    Args:
        page: Text of the page in Markdown.
    """
    return {found["file"] for found in _PLACE.finditer(page)}


def read(file: Path) -> list[list[str]]:
    """Reads the rows of a CSV file, the names of the columns first.

    Args:
        file: CSV file.

    Raises:
        ValueError: The file is missing, empty, or has rows of unequal lengths.
    """
    if not file.exists():
        raise ValueError(f"{file} is missing; a page has a table from it")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        raise ValueError(f"{file} has rows of {sorted({len(row) for row in rows})} cells; wanted a head and rows alike")
    return rows


def write(file: Path, rows: Rows) -> None:
    """Writes a CSV file, and makes its folder if necessary.

    Args:
        file: CSV file, overwritten.
        rows: Cells by row, the names of the columns first.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)


def markdown(rows: Rows) -> str:
    """Formats rows as a table in Markdown, with columns of numbers aligned right.

    Args:
        rows: Cells by row, the names of the columns first; at least one more row.
    """
    right = [
        any(cell[:1].isdigit() for cell in column) and all(_NUMBER.match(cell) for cell in column)
        for column in zip(*rows[1:], strict=True)
    ]
    lines = [_line(rows[0]), "|" + "|".join("---:" if each else "---" for each in right) + "|"]
    return "\n".join([*lines, *map(_line, rows[1:])])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _columns(words: str, count: int, file: str) -> list[int]:
    """Parses the numbers of columns: `1, 3-5` -> [0, 2, 3, 4]; raises ValueError for a column that does not exist."""
    found: list[int] = []
    for part in words.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first) - 1, int(last or first))
    if not found or min(found) < 0 or max(found) >= count:
        raise ValueError(f"`columns {words}` of {file}, which has {count}")
    return found
