"""The page of predicted plans on GPUs is what the model says now."""

from pathlib import Path

import pytest

from gradwire.bench.studies.gpu.plans import CLUSTERS, COLUMNS, main, predict, tables, with_tables
from gradwire.cli.predict import build_parser, read_question
from gradwire.topology.presets import PRESETS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "gpu_plans.md"


def test_the_page_shows_what_the_model_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `python -m gradwire.bench.studies.tables`"
    assert "Nothing on this page has been measured" in text


def test_no_row_is_slower_than_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == tables()
    for machines in CLUSTERS:
        for row in predict(machines):
            assert row.plan.seconds <= min(row.nccl.values()) * (1 + 1e-9)
            assert len(list(row.cells())) == len(COLUMNS)


def test_the_commands_on_the_page_predict_for_the_same_clusters() -> None:
    for machines in CLUSTERS:
        options = build_parser().parse_args([*machines.command.split(), "--nodes", "4", "--gradient-mb", "25"])
        assert options.preset in PRESETS
        assert read_question(options).cluster(4) == machines.cluster(4)


def test_a_page_without_a_place_for_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="tables: begin"):
        with_tables("# A page")
