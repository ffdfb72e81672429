"""The files of figures: what ran is replaced, the rest stays; each command's JSON becomes the rows of its table."""

import json
from pathlib import Path

import pytest

from gradwire.bench.studies import performance
from gradwire.bench.studies.performance import SECTIONS, Record, Section, compared, peers, sweep
from gradwire.bench.studies.tables.page import read

DATA = Path(__file__).resolve().parents[3] / "docs" / "results" / "data" / "performance"


def test_only_what_ran_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(section: Section, timeout_seconds: float, extra: list[str]) -> Record | None:
        return {"megabytes": 16, "nic": "1mbit", "results": []} if section.name == "hook" else None

    first = Section("hook", ("this",), lambda record: ({"hook": [["a"], ["1"]]}, "it ran"))
    second = Section("bad", ("that",), lambda record: ({"bad": [["a"], ["2"]]}, ""))
    monkeypatch.setattr(performance, "SECTIONS", (first, second))
    monkeypatch.setattr(performance, "measure", found)
    performance.keep(second, {}, [], tmp_path)
    old = (tmp_path / "bad.csv").read_text()
    assert performance.main(["--data", str(tmp_path), "--picture", str(tmp_path / "history.svg")]) == 1
    assert read(tmp_path / "hook.csv") == [["a"], ["1"]] and (tmp_path / "bad.csv").read_text() == old
    runs = read(tmp_path / "runs.csv")
    assert [row[:3] for row in runs[1:]] == [["hook", "`python -m this`", "it ran"], ["bad", "`python -m that`", ""]]
    with pytest.raises(SystemExit, match="2"):
        performance.main(["ugly", "--data", str(tmp_path)])


def test_a_command_that_fails_leaves_nothing_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert performance.measure(Section("bad", ("json.tool", "/none"), performance.kernels), 60.0, []) is None
    assert "bad: status" in capfd.readouterr().err


def test_a_comparison_names_what_does_not_run_and_puts_the_fastest_first() -> None:
    results = [
        {"name": "slow", "seconds": 2.0, "nic_nbytes": None, "error": None, "speed_up": 1.0},
        {"name": "fast", "seconds": 1.0, "nic_nbytes": 2e6, "error": 1e-3, "speed_up": 2.0},
        {"name": "none", "seconds": None, "nic_nbytes": None, "error": None, "speed_up": None},
    ]
    record = {"title": "a model", "source": None, "expected_plain_seconds": 1.5, "results": results}
    files, words = compared("case")(record)
    assert files["case"][1:] == [["fast", "1.000", "2.00", "1.0e-03", "2.00x"], ["slow", "2.000", "-", "-", "1.00x"]]
    assert words.startswith("a model") and "1.500 s a step" in words and words.endswith("Does not run: none")


def test_sizes_stand_in_rows_and_peers_or_backends_in_columns() -> None:
    half = {"time": 3.0}
    rows = [{"size": size, "out_of_place": half, "in_place": {"time": 2.0}} for size in (8, 64, 8, 64)]
    blocks = [{"facts": {"backend": name}} for name in ("gradwire", "gloo")]
    config = {"warmup_iters": 1, "iterations": 20}
    files, words = sweep({"results": rows, "blocks": blocks, "config": config, "out_of_bounds": {"count": 0}})
    assert files["sweep"][0] == ["bytes", "gradwire, us", "gradwire, in place", "gloo, us", "gloo, in place"]
    assert files["sweep"][1] == ["8", "3.00", "2.00", "3.00", "2.00"] and words.endswith("nothing wrong")
    files, words = peers({"seconds": json.loads('{"2": {"gloo": [{"4096": 2e-6}, {"4096": 4e-6}, {"4096": 3e-6}]}}')})
    assert files == {"peers_2": [["size", "gloo"], ["4 KB", "3.0 (2.0)"]]} and words == "3 rounds in turns"


def test_the_files_of_the_page_are_those_that_the_sections_write() -> None:
    runs = read(DATA / "runs.csv")
    assert runs[0] == performance.RUNS_HEAD and [row[0] for row in runs[1:]] == [one.name for one in SECTIONS]
    written = {"peers_2", "peers_4", "runs", "history", *(one.name for one in SECTIONS if one.name != "peers")}
    assert {file.stem for file in DATA.glob("*.csv")} == written
