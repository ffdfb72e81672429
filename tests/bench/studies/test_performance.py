"""The page of figures: sections that ran are replaced, the others keep their text."""

from pathlib import Path

import pytest

from gradwire.bench.studies import performance
from gradwire.bench.studies.performance import SECTIONS, Section, body, split_page, write_page


def test_a_page_is_read_back_as_it_was_written() -> None:
    bodies = {one.title: body(one, f"| table of {one.name} |") for one in SECTIONS[::2]}
    page = write_page(bodies)
    found = split_page(page)
    assert list(found) == [one.title for one in SECTIONS]
    assert {title: text for title, text in found.items() if title in bodies} == bodies
    assert page.count(performance.NOT_YET) == len(SECTIONS) - len(bodies)
    assert write_page(found) == page


def test_only_what_ran_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = (
        Section("good", "Good", "It prints.", ("this",)),
        Section("bad", "Bad", "It fails.", ("json.tool", "/none")),
    )
    monkeypatch.setattr(performance, "SECTIONS", sections)
    page = tmp_path / "page.md"
    page.write_text(write_page({"Bad": "an old figure"}))
    assert performance.main(["--output", str(page)]) == 1
    found = split_page(page.read_text())
    assert "Namespaces are one honking great idea" in found["Good"] and "python -m this" in found["Good"]
    assert found["Bad"] == "an old figure"
    assert performance.main(["ugly", "--output", str(page)]) == 2
