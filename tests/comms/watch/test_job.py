"""Whole jobs under a watch that they know nothing of: torchrun, gloo, GRADWIRE_WATCH=1."""

import pytest

from gradwire.bench.studies.watch.job import FAULT_STEP
from gradwire.bench.studies.watch.planted import run

pytestmark = pytest.mark.slow


def test_in_tensor_and_data_parallel_training_the_late_rank_alone_is_named() -> None:
    report, text = run("tensor_parallel", "late", 2, FAULT_STEP + 40)
    assert report is not None, text
    assert {each["late"]["rank"] for each in report["late"]} == {2}, text
    assert report["late"][0]["late"]["line"].startswith("job.py:"), text
    assert not report["stalls"] and not report["disagreements"], text


@pytest.mark.parametrize("fault", ["skip", "order"])
def test_ranks_that_disagree_are_named_with_the_lines_that_asked(fault: str) -> None:
    _, text = run("ddp", fault, 3, FAULT_STEP + 20)
    said = [line for line in text.splitlines() if "disagree in collective" in line]
    assert said, text
    assert "rank 3 issued" in said[0] and "job.py:" in said[0].partition("rank 3 issued")[2], said
