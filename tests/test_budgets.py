"""Budgets of what a reader has to know: lines of each folder in the wheel and of the studies, names, options.

A change that needs more raises its number here, and says in its pull request what it is worth: see CONTRIBUTING.md.
"""

import ast
import dataclasses
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

from gradwire.comms.config import Config
from gradwire.compressors.registry import BUILT_IN

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "bench" / "studies"
MOST_LINES = {
    "topology": 9_472,
    "compressors": 4_074,
    "comms": 25_281,
    "bench": 12_936,
    "gradwire": 1_516,
    "bench/studies": 5_730,
}
"""Folder -> lines of code: no blank lines, comments and docstrings; `bench` without its studies, which are not in the
wheel."""
MOST_LINES_OF_A_FILE = 600
MOST_COMPRESSORS = 12
MOST_OPTIONS = 15
LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@cache
def lines_of_code(file: Path) -> int:
    """Lines that hold code; each file is read once, for its own budget and its folder's."""
    text = file.read_text(encoding="utf-8")
    described: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            described.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - described)


def files_of(folder: str) -> list[Path]:
    """Its Python files; of `bench` those in the wheel, of `gradwire` not those of the folders that it links to."""
    if folder == "gradwire":
        return [*ROOT.glob("gradwire/*.py"), *ROOT.glob("gradwire/cli/**/*.py")]
    found = (ROOT / folder).rglob("*.py")
    return [file for file in found if folder == "bench/studies" or not file.is_relative_to(STUDIES)]


def test_lines_are_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text('"""Says\nwhat."""\n\n# why\nx = (\n    1,\n)\n"""A constant."""\n')
    assert lines_of_code(file) == 3


@pytest.mark.parametrize("folder", MOST_LINES)
def test_a_folder_keeps_to_its_budget(folder: str) -> None:
    lines = sum(map(lines_of_code, files_of(folder)))
    assert 0 < lines <= MOST_LINES[folder], (
        f"{folder} has {lines} lines of code; its budget is {MOST_LINES[folder]}: remove something, or raise it and "
        "say what that is worth"
    )


def test_no_file_of_the_product_is_longer_than_one_can_read() -> None:
    files = [file for folder in MOST_LINES if folder != "bench/studies" for file in files_of(folder)]
    long = {
        str(file.relative_to(ROOT)): lines for file in files if (lines := lines_of_code(file)) > MOST_LINES_OF_A_FILE
    }
    assert not long, f"{long}: the budget is {MOST_LINES_OF_A_FILE} lines of code; divide what answers two questions"


def test_compressors_and_options_keep_to_their_budgets() -> None:
    assert len(BUILT_IN) <= MOST_COMPRESSORS, sorted(BUILT_IN)
    options = [entry.name for entry in dataclasses.fields(Config)]
    assert len(options) <= MOST_OPTIONS, options
