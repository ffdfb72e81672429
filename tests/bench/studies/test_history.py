"""Each run of the performance study is one row, and a ratio that has become worse is marked; how it is drawn."""

from pathlib import Path

import pytest

from gradwire.bench.studies import history, performance
from gradwire.bench.studies.history import HEAD, add_run, commit_of, draw, value
from gradwire.bench.studies.tables.page import read, write

HERE = "a processor, 2 cores, torch 2.13.0+cpu"
HOOK = ["cluster", "way", "s", "speed-up"]
ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, commit: str, exact: str, fp16: str | None = None, machine: str = HERE) -> list[str]:
    """One run that measured the hook, and the transformer if `fp16` is given."""
    write(folder / "hook.csv", [HOOK, ["2x2", "plain DDP", "1", "1.00"], ["2x2", "gradwire", "0.7", exact]])
    if fp16 is not None:
        write(folder / "compare.csv", [["compared", "speed-up"], ["gradwire fp16", fp16]])
    sections = ["hook"] if fp16 is None else ["hook", "compare"]
    return add_run(folder, sections, commit, f"{machine}, 2026-11-30")


def cells(folder: Path, name: str) -> list[str]:
    return [row[HEAD.index(name)] for row in read(folder / "history.csv")[1:]]


def test_a_ratio_that_has_lost_more_than_a_twentieth_of_the_best_is_marked(tmp_path: Path) -> None:
    assert run(tmp_path, "a", "1.50", "2.26x") == []
    assert run(tmp_path, "b", "1.43") == []
    assert run(tmp_path, "c", "1.42", "2.30x") == ["2x2 exact is 1.42, and was 1.50 at a (2026-11-30)"]
    assert len(run(tmp_path, "d", "1.40", "2.00x")) == 2
    assert cells(tmp_path, "2x2 exact") == ["1.50", "1.43", "1.42!", "1.40!"]
    assert cells(tmp_path, "fp16") == ["2.26", "-", "2.30", "2.00!"]
    assert cells(tmp_path, "int8") == ["-"] * 4  # a configuration that did not run
    assert value("1.42!") == value("1.42x") == 1.42


def test_machines_are_not_compared(tmp_path: Path) -> None:
    assert run(tmp_path, "a", "1.50") == run(tmp_path, "b", "1.20", machine="another, 2 cores, torch 2.13.0") == []
    assert [row[:3] for row in read(tmp_path / "history.csv")[1:]] == [
        ["2026-11-30", "a", HERE],
        ["2026-11-30", "b", "another, 2 cores, torch 2.13.0"],
    ]


def test_the_picture_has_every_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for commit, exact in (("a1b2", "1.50"), ("c3d4", "1.20")):
        run(tmp_path, commit, exact)
    draw(tmp_path, tmp_path / "history.svg")
    text = (tmp_path / "history.svg").read_text(encoding="utf-8")
    # As letters or, with their outlines, in comments: other tests of this process choose that of matplotlib.
    assert all(words in text for words in ("a1b2", "c3d4", "2x2 exact", "share of the first run on the same machine"))


def test_the_study_adds_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = iter(("1.50", "1.00"))
    section = performance.Section(
        "hook", ("this",), lambda record: ({"hook": [HOOK, ["2x2", "gradwire", "1", next(found)]]}, "")
    )
    monkeypatch.setattr(performance, "SECTIONS", (section,))
    monkeypatch.setattr(performance, "measure", lambda *ignored: {})
    monkeypatch.setattr(history, "draw", lambda folder, output: output.write_text("a picture"))
    words = ["--data", str(tmp_path), "--picture", str(tmp_path / "picture.png")]
    assert performance.main(words) == performance.main(words) == 0
    assert cells(tmp_path, "2x2 exact") == ["1.50", "1.00!"]
    assert (tmp_path / "picture.png").read_text() == "a picture"
    assert "slower than before: 2x2 exact is 1.00, and was 1.50 at" in capfd.readouterr().err


def test_a_commit_is_named_and_a_folder_without_git_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"
    assert (ROOT / ".git").exists() is (commit_of(ROOT) != "unknown")


def test_every_ratio_has_its_cell_in_the_files_of_the_page() -> None:
    """One whose row has another name since would leave the history without a word."""
    data = ROOT / "docs" / "results" / "data" / "performance"
    for ratio in history.RATIOS:
        head, *rows = read(data / f"{ratio.section}.csv")
        assert ratio.column in head, ratio
        assert [row for row in rows if tuple(row[: len(ratio.row)]) == ratio.row], ratio
