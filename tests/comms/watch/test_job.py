"""Whole jobs under a watch that they know nothing of: gloo, GRADWIRE_WATCH=1; one of them under torchrun itself.

The others' ranks are forked from a process that has torch, and end as torchrun ends them: five imports of torch and
what DDP imports with it take half a minute of processor time.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gradwire.bench.studies.watch.forked import run_ranks
from gradwire.bench.studies.watch.injected import LIMIT_SECONDS, RANKS, STALL_SECONDS
from gradwire.bench.studies.watch.job import FAULT_STEP
from gradwire.comms.backend.register import register
from gradwire.comms.watch.activity import LOADER, QUEUE
from support.processes import Processes

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("stalling_job.py")
MOST_STEPS = 1000
"""Of a job that ends once the watch has said enough."""


def be_rank(arguments: list[str], variables: dict[str, str], rank: int, port: int) -> None:
    """What a rank of torchrun does, behind its `import torch`."""
    torch.set_num_threads(1)
    os.environ |= variables | {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GRADWIRE_WATCH": "1",
    }
    register()  # as `import torch` does it at its end
    with patch.object(sys, "argv", [JOB.name, *arguments]):
        runpy.run_path(str(JOB), run_name="__main__")


def launch(_: int, arguments: list[str], variables: dict[str, str]) -> tuple[list[int], str]:
    """What torchrun does, in a process that has torch."""
    return run_ranks(RANKS, partial(be_rank, arguments, variables), LIMIT_SECONDS)


def run_forked(
    processes: Processes, folder: Path, kind: str, fault: str, rank: int, steps: int, **variables: str
) -> tuple[dict[str, Any] | None, str]:
    """Runs the job with GRADWIRE_WATCH=1; the watch's report, None where it was not written, and what was printed.

    Args:
        processes: Starts them.
        folder: For the report.
        kind: Of the job.
        fault: That is planted.
        rank: Which rank has it.
        steps: Of the job.
        variables: More of the watch's: `TRACE="t.json"` is GRADWIRE_WATCH_TRACE.
    """
    words = words_of(kind, fault, rank, steps)
    ((statuses, text),) = processes(1, launch, words, watched(folder, variables), seconds=LIMIT_SECONDS + 60)
    return report_in(folder), f"ended with {statuses}\n{text}"


def words_of(kind: str, fault: str, rank: int, steps: int) -> list[str]:
    return ["--kind", kind, "--fault", fault, "--rank", str(rank), "--steps", str(steps)]


def watched(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The variables of a watch that reports into a folder."""
    given = {"JSON": str(folder / "watch.json"), "STALL_SECONDS": str(STALL_SECONDS)} | variables
    return {f"GRADWIRE_WATCH_{key}": value for key, value in given.items()}


def report_in(folder: Path) -> dict[str, Any] | None:
    report = folder / "watch.json"
    return json.loads(report.read_text()) if report.exists() else None


def test_in_tensor_and_data_parallel_training_the_late_rank_alone_is_named(
    processes: Processes, tmp_path: Path
) -> None:
    report, text = run_forked(processes, tmp_path, "tensor_parallel", "late", 2, FAULT_STEP + 40, STALL_SECONDS="60")
    assert report is not None, text
    late = [each["late"] for each in report["late"] if each["late"]["busy_with"] != QUEUE]
    assert {each["rank"] for each in late} == {2}, text
    # On a busy machine the rank may have been late before, between two lines of the script.
    assert any((each["line"] or "").startswith("stalling_job.py:") for each in late), text
    assert not report["stalls"] and not report["disagreements"], text


def test_a_rank_that_is_late_in_its_data_loader_is_said_to_be_so_with_the_line(
    processes: Processes, tmp_path: Path
) -> None:
    """However slow the machine is: the job ends once the watch has explained it, and other ranks may be late, too."""
    report, text = run_forked(processes, tmp_path, "ddp", "loader", 1, MOST_STEPS, STALL_SECONDS="60")
    assert report is not None, text
    late = [each["late"] for each in report["late"] if each["late"]["rank"] == 1]
    found = next(each for each in late if each["busy_with"] == LOADER)
    assert found["line"].startswith("stalling_job.py:") and found["line"].endswith(" in __getitem__"), text
    waited_in = [each["waited_in"] for each in report["late"] if each["late"]["rank"] == 1]
    held = [str(each["holds"]) for each in waited_in if each is not None]
    assert any(re.fullmatch(r"gradients of \d\.(bias|weight) to \d\.(bias|weight)", each) for each in held), text
    assert "watch: rank 1 is waited for, longest in all_reduce of [" in text and not report["disagreements"], text


@pytest.mark.parametrize(("fault", "rank"), [("skip", 3), ("order", 3), ("shape", 0), ("dtype", 3)])
def test_ranks_that_disagree_are_named_with_the_lines_that_asked(
    fault: str, rank: int, processes: Processes, tmp_path: Path
) -> None:
    """gloo ends a process that receives more than it asked for; in one case that is rank 0, which compares."""
    _, text = run_forked(processes, tmp_path, "ddp", fault, rank, FAULT_STEP + 20)
    said = [line for line in text.splitlines() if "disagree in collective" in line]
    assert said, text
    assert f"rank {rank} issued" in said[0] and "job.py:" in said[0].partition(f"rank {rank} issued")[2], said


def test_a_stage_of_a_pipeline_that_sends_nothing_is_named_with_who_waits_for_it(
    processes: Processes, tmp_path: Path
) -> None:
    report, text = run_forked(processes, tmp_path, "pipeline", "hang", 1, 3 * FAULT_STEP)
    assert report is not None, text
    said = " ".join(report["stalls"])
    message = r"(?:sent message \d+ from 1 to [02]|asked for message \d+ from [02] to 1) of group default"
    assert re.search(rf"rank 1 on \S+ has not {message}", said), text
    assert re.search(r"rank [02] waits for it; rank 1 is at stalling_job.py:\d+ in stand_still", said), text
    assert not report["disagreements"], text


def check_a_stall_in_all_that_is_written(report: dict[str, Any] | None, text: str, folder: Path, ranks: int) -> None:
    """Of a job in which rank `ranks // 2` stands still: its report, its timeline and its metrics."""
    assert report is not None, text
    late = ranks // 2
    stall = next(each for each in report["stalls"] if "in stand_still" in each)
    assert re.search(rf"rank {late} on \S+ has not reached collective \d+ of group default", stall), text
    assert f"rank {late} is at stalling_job.py:" in stall, text
    assert re.search(r"gradients of \d\.(bias|weight) to \d\.(bias|weight), issued at job.py", stall), text
    assert text.count("watched for") == 2, text  # once for the signal that rank 0 sends itself, once at the end
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in spans} == set(range(ranks)) and {each["cat"] for each in spans} == {"group default"}
    assert any("gradients of" in each["name"] for each in spans)
    metrics = (folder / "watch.prom").read_text()
    assert re.search(r'gradwire_watch_collectives\{group="default"\} \d{3}', metrics), metrics
    assert f"gradwire_watch_stalls {len(report['stalls'])}\n" in metrics, metrics


def test_report_timeline_and_metrics_of_one_job_and_whose_gradients_were_waited_for(
    processes: Processes, tmp_path: Path
) -> None:
    files = {"TRACE": str(tmp_path / "timeline.json"), "METRICS": str(tmp_path / "watch.prom")}
    report, text = run_forked(processes, tmp_path, "ddp", "hang", 2, 150, **files)
    check_a_stall_in_all_that_is_written(report, text, tmp_path, RANKS)


def test_under_torchrun_itself_the_variables_alone_have_a_job_watched(tmp_path: Path) -> None:
    files = {"TRACE": str(tmp_path / "timeline.json"), "METRICS": str(tmp_path / "watch.prom")}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB))
    named = (f"{name}={value}" for name, value in watched(tmp_path, files).items())
    ended = subprocess.run(
        ["env", "GRADWIRE_WATCH=1", *named, *torchrun, *words_of("ddp", "hang", 1, 150)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    check_a_stall_in_all_that_is_written(report_in(tmp_path), ended.stdout + ended.stderr, tmp_path, 2)


EXCHANGE = """
import time, torch, torch.distributed as dist, gradwire
torch.set_num_threads(1)
dist.init_process_group("gloo")
gradients, go_on, until = torch.ones(500_000), torch.ones(1), time.monotonic() + 100
while go_on.item():
    time.sleep(0.05)
    dist.all_reduce(gradients.fill_(1.0))
    report = gradwire.watch().report
    go_on.fill_(float(time.monotonic() < until and not (report and report.slow_links)))
    dist.all_reduce(go_on, dist.ReduceOp.MIN)
dist.destroy_process_group()
"""


@pytest.mark.netns
def test_the_link_that_all_ranks_wait_for_is_named(tmp_path: Path) -> None:
    script, file = tmp_path / "exchange.py", tmp_path / "watch.json"
    script.write_text(EXCHANGE)
    emulate = (sys.executable, "-m", "gradwire", "emulate", "--nodes", "3", "--nic", "100mbit,100mbit,25mbit", "--")
    watched = ("env", "GRADWIRE_WATCH=1", f"GRADWIRE_WATCH_JSON={file}", sys.executable, str(script))
    ended = subprocess.run((*emulate, *watched), capture_output=True, text=True, timeout=200, check=False)
    text = ended.stdout + ended.stderr
    report = json.loads(file.read_text())
    assert [each["which"] for each in report["slow_links"]] == ["of node2"], text
    assert "watch: the link of node2 is slow, from " in text, text
    assert {(each["source"], each["target"]) for each in report["links"]} >= {("node0", "node2"), ("node2", "node1")}
