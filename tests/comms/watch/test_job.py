"""Whole jobs under a watch that they know nothing of: torchrun, gloo, GRADWIRE_WATCH=1."""

import json
import re
from pathlib import Path

import pytest

from gradwire.bench.studies.watch.job import FAULT_STEP
from gradwire.bench.studies.watch.planted import run
from gradwire.comms.watch.activity import QUEUE

pytestmark = pytest.mark.slow


def test_in_tensor_and_data_parallel_training_the_late_rank_alone_is_named() -> None:
    report, text = run("tensor_parallel", "late", 2, FAULT_STEP + 40, STALL_SECONDS="60")
    assert report is not None, text
    late = [each["late"] for each in report["late"] if each["late"]["busy_with"] != QUEUE]
    assert {each["rank"] for each in late} == {2}, text
    assert late[0]["line"].startswith("job.py:"), text
    assert not report["stalls"] and not report["disagreements"], text


@pytest.mark.parametrize("fault", ["skip", "order", "shape", "dtype"])
def test_ranks_that_disagree_are_named_with_the_lines_that_asked(fault: str) -> None:
    _, text = run("ddp", fault, 3, FAULT_STEP + 20)
    said = [line for line in text.splitlines() if "disagree in collective" in line]
    assert said, text
    assert "rank 3 issued" in said[0] and "job.py:" in said[0].partition("rank 3 issued")[2], said


def test_a_stage_of_a_pipeline_that_sends_nothing_is_named_with_who_waits_for_it() -> None:
    report, text = run("pipeline", "hang", 1, 3 * FAULT_STEP)
    assert report is not None, text
    said = " ".join(report["stalls"])
    message = r"(?:sent message \d+ from 1 to [02]|asked for message \d+ from [02] to 1) of group default"
    assert re.search(rf"rank 1 on \S+ has not {message}", said), text
    assert re.search(r"rank [02] waits for it; rank 1 is at job.py:\d+ in stand_still", said), text
    assert not report["disagreements"], text


def test_report_timeline_and_metrics_of_one_job_and_whose_gradients_were_waited_for(tmp_path: Path) -> None:
    files = {"TRACE": tmp_path / "timeline.json", "METRICS": tmp_path / "watch.prom"}
    report, text = run("ddp", "hang", 2, 150, **{name: str(path) for name, path in files.items()})
    assert report is not None, text
    stall = next(each for each in report["stalls"] if "in stand_still" in each)
    assert re.search(r"rank 2 on \S+ has not come to collective \d+ of group default", stall), text
    assert "rank 2 is at job.py:" in stall, text
    assert re.search(r"gradients of \d\.(bias|weight) to \d\.(bias|weight), issued at job.py", stall), text
    assert text.count("watched for") == 2, text  # once for the signal that rank 0 sends itself, once at the end
    events = json.loads(files["TRACE"].read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in spans} == {0, 1, 2, 3} and {each["cat"] for each in spans} == {"group default"}
    assert any("gradients of" in each["name"] for each in spans)
    metrics = files["METRICS"].read_text()
    assert re.search(r'gradwire_watch_collectives\{group="default"\} \d{3}', metrics), metrics
    assert f"gradwire_watch_stalls {len(report['stalls'])}\n" in metrics, metrics
