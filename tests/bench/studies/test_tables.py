"""The tables of docs/results are those of the data: made by one command, and nothing on a page is written by hand."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.bench.studies.tables import __main__ as command
from gradwire.bench.studies.tables.made import MADE
from gradwire.bench.studies.tables.page import files_of, markdown, read, with_tables, write

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"

OF_WORDS = {
    "exchanges": ["quantity"],
    "gpu": ["check", "kernel"],
    "gpu_plans": ["what"],
    "outer": ["published"],
    "sharded": ["collective"],
}
"""A page -> the first columns of its tables by hand, which hold words or bounds by counting, and no measured figure."""

cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12).map(str.strip)


def test_every_page_shows_what_its_data_say() -> None:
    made = command.pages(RESULTS)
    assert len(made) > 15
    different = [page.name for page, text in made.items() if page.read_text(encoding="utf-8") != text]
    assert not different, "change docs/results/data, and run `python -m gradwire.bench.studies.tables`"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_no_figure_stands_in_a_table_by_hand(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- data: .*?<!-- /data -->", "", text, flags=re.DOTALL)
    if page.stem in MADE:
        marks = r"<!-- (?:(\w+): begin|(printed)) -->.*?<!-- (?:\w+: end|/printed) -->"
        text = re.sub(marks, "", text, flags=re.DOTALL)
    heads = re.findall(r"^\| *([^|]*?) *\|[^\n]*\n\|[-: |]+\|$", text, flags=re.MULTILINE)
    assert heads == OF_WORDS.get(page.stem, [])
    assert "┃" not in text, "a table as a terminal shows it is wider than a page"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=2)))
def test_what_is_written_is_read_and_shown(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "a.csv", rows)
    assert read(folder / "a.csv") == rows
    page = "before\n<!-- data: a.csv -->\nold\n<!-- /data -->\nafter\n"
    shown = with_tables(page, folder)
    assert markdown(rows) in shown and "\nold\n" not in shown
    assert shown.startswith("before\n") and shown.endswith("\nafter\n") and with_tables(shown, folder) == shown
    found = re.findall(r"^\|.*\|$", markdown(rows), flags=re.MULTILINE)
    assert len(found) == len(rows) + 1


def test_columns_are_chosen_and_numbers_stand_right(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [["way", "s", "MB", "note"], ["plain", "1.5", "20", "a|b"], ["int8", "0.5", "-", ""]])
    page = with_tables("<!-- data: a.csv, columns 1, 3-4 -->\n<!-- /data -->\n", tmp_path)
    assert "| way | MB | note |\n|---|---:|---|\n| plain | 20 | a\\|b |" in page
    assert files_of(page) == {"a.csv"}


def test_a_place_without_its_file_and_a_file_without_a_place_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- data: a.csv -->\n<!-- /data -->\n")
    assert command.main(["--results", str(tmp_path)]) == 2
    assert "a.csv is missing" in capsys.readouterr().err
    write(tmp_path / "data" / "page" / "a.csv", [["s"], ["1"]])
    write(tmp_path / "data" / "page" / "b.csv", [["s"], ["1"]])
    assert command.main(["--results", str(tmp_path)]) == 2
    assert "b.csv has no place in" in capsys.readouterr().err
    (tmp_path / "data" / "page" / "b.csv").unlink()
    assert command.main(["--results", str(tmp_path), "--check"]) == 1
    assert command.main(["--results", str(tmp_path)]) == 0 and "| 1 |" in page.read_text()
    assert command.main(["--results", str(tmp_path), "--check"]) == 0
    page.write_text("<!-- data: a.csv, columns 2 -->\n<!-- /data -->\n")
    assert command.main(["--results", str(tmp_path)]) == 2 and "which has 1" in capsys.readouterr().err
    page.write_text("<!-- data: a.csv -->\n")
    assert command.main(["--results", str(tmp_path)]) == 2 and "a place of a table is not" in capsys.readouterr().err
