"""The self-test on the CPU: all of its parts, its words, and what it says of processes that crash, hang or fail."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gradwire.__main__ import main
from gradwire.bench.emulation.launch import JobOutcome
from gradwire.bench.selftest import command
from gradwire.bench.selftest.checks import FAIL, PASS, SKIPPED, SelftestResult
from gradwire.bench.selftest.coverage import NcclSite, RecordedGroup, Touched, nccl_sites, touched_calls
from gradwire.bench.selftest.kernel_checks import KernelBandwidth
from gradwire.bench.selftest.rank import BEGUN, ENDED, PLANNED, RECORD, TRAININGS
from gradwire.bench.selftest.report import WIDTH, as_record, exit_status, print_report
from gradwire.bench.selftest.run import NAME_OF_PROCESS, PartCollector, SelftestFindings, parts_of
from gradwire.bench.selftest.training_checks import TRAININGS as HOOKS
from gradwire.comms.transport import nccl

SMALL = ("--device", "cpu", "--numel", "1100")


def ended(name: str, outcome: str, reason: str = "", worst: float | None = 0.0) -> str:
    result = {"part": "here", "name": name, "outcome": outcome, "reason": reason, "worst_difference": worst}
    return json.dumps({RECORD: ENDED, "value": result})


def record(kind: str, value: object) -> str:
    return json.dumps({RECORD: kind, "value": value})


def outcome_of(*codes: int, output: str = "", failed: int | None = None, timed_out: bool = False) -> JobOutcome:
    return JobOutcome(
        returncodes=codes, output=(output,) * len(codes), seconds=1.0, first_failure=failed, timed_out=timed_out
    )


def collected(size: int, lines: list[tuple[int, str]], outcome: JobOutcome) -> dict[str, SelftestResult]:
    collector = PartCollector("here", size, lambda _: None)
    for rank, line in lines:
        collector.line(rank, line)
    return {each.name: each for each in collector.results(outcome)}


@pytest.mark.slow
def test_all_parts_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "selftest.json"
    assert main(["selftest", *SMALL, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "not run: CUDA kernels, their bandwidth, NCCL: `--device cpu` was given" in text
    found = json.loads(file.read_text())
    assert found["exit_status"] == 0
    assert {check["outcome"] for check in found["checks"]} == {PASS}
    assert {check["part"] for check in found["checks"]} == {
        "kernels on the CPU",
        "gloo, 2 ranks",
        "trainings, 2 ranks",
    }
    assert found["coverage"]["kernel functions on cpu"]["missing"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert found["losses"].keys() == {"plain DDP", *HOOKS}
    assert found["losses"]["exact"] == pytest.approx(found["losses"]["plain DDP"], rel=1e-3)
    assert found["bandwidth"] == []
    assert file.stat().st_size < 60_000, "an issue takes 65,536 characters"


@pytest.mark.slow
def test_an_interrupt_leaves_no_process() -> None:
    words = [sys.executable, "-m", "gradwire", "selftest", *SMALL, "--numel", "1000000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 120
        while not (below := children(process.pid)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert below, process.communicate()[0] if process.poll() is not None else "it has started no process"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, output
    assert "Traceback" not in output
    deadline = time.monotonic() + 20  # what the kernel ends when its parent is gone takes a moment
    while (left := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "9"], "`--ranks`: found 9, wanted 1 to 8"),
        (["--seconds", "3"], "`--seconds`: found 3, wanted 20 to"),
        (["--numel", "0"], "`--numel`: found 0"),
        (["--bandwidth-numel", "5"], "`--bandwidth-numel`: found 5"),
        (["--json", "/nowhere/file"], "`--json`: cannot write /nowhere/file"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert f"gradwire selftest: {message}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == 2
    assert "`--device cuda`: torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "ranks", "names", "nodes", "shares"),
    [
        (1, 2, ["NCCL, 1 rank", "NCCL, 2 ranks on 1 GPU", "trainings, 2 ranks on 1 GPU"], (1, 1), True),
        (2, 2, ["NCCL, 1 rank", "NCCL, 2 ranks", "trainings, 2 ranks"], (1, 1), False),
        (8, 8, ["NCCL, 1 rank", "NCCL, 8 ranks", "trainings, 8 ranks"], (4, 4), False),
        (3, 3, ["NCCL, 1 rank", "NCCL, 3 ranks", "trainings, 3 ranks"], (1, 1, 1), False),
    ],
)
def test_every_gpu_gets_a_rank(gpus: int, ranks: int, names: list[str], nodes: tuple[int, ...], shares: bool) -> None:
    parts = parts_of("cuda", gpus, ranks, 10, 1024)
    assert [part.settings.part for part in parts] == ["kernels on the CPU", "kernels on the GPU", *names]
    assert (parts[-1].nodes, parts[-1].shares_gpu, parts[-1].settings.kind) == (nodes, shares, TRAININGS)
    assert parts[1].settings.bandwidth_numel == 1024


def test_ranks_are_joined_to_one_result() -> None:
    lines = [(rank, record(PLANNED, ["a", "b"])) for rank in range(2)]
    lines += [(0, ended("a", PASS, worst=0.5)), (1, ended("a", PASS, worst=0.75)), (0, "a warning")]
    lines += [(0, ended("b", PASS)), (1, ended("b", FAIL, "1 of 2 elements differ", 3.0))]
    found = collected(2, lines, outcome_of(0, 0))
    assert (found["a"].outcome, found["a"].worst_difference) == (PASS, 0.75)
    assert (found["b"].outcome, found["b"].reason) == (FAIL, "rank 1: 1 of 2 elements differ")


def test_a_crash_is_put_down_to_its_check_and_the_rest_is_not_reached() -> None:
    lines = [(0, record(PLANNED, ["a", "b", "c"])), (0, record(BEGUN, "a")), (0, ended("a", PASS))]
    lines += [(0, record(BEGUN, "b"))]
    found = collected(1, lines, outcome_of(-11, output="Fatal: here\n" + record(BEGUN, "b"), failed=0))
    assert found["a"].outcome == PASS
    assert (found["b"].outcome, found["b"].reason) == (FAIL, "rank 0 ended with signal 11\nFatal: here")
    assert (found["c"].outcome, found["c"].reason) == (SKIPPED, "not reached: `b` failed before it")


def test_an_error_on_one_rank_is_the_reason_that_is_given() -> None:
    lines = [(rank, line) for rank in range(2) for line in (record(PLANNED, ["a", "b"]), record(BEGUN, "a"))]
    lines += [(1, ended("a", FAIL, "RuntimeError: NCCL error", None))]
    found = collected(2, lines, outcome_of(-15, 1, failed=1))
    assert (found["a"].outcome, found["a"].reason) == (FAIL, "rank 1: RuntimeError: NCCL error")
    assert found["b"].outcome == SKIPPED


def test_an_error_on_all_ranks_is_one_failure() -> None:
    lines = [(rank, line) for rank in range(2) for line in (record(PLANNED, ["a", "b"]), record(BEGUN, "a"))]
    lines += [(rank, ended("a", FAIL, "RuntimeError: refused", None)) for rank in range(2)]
    found = collected(2, lines, outcome_of(1, 1, failed=1))
    assert (found["a"].outcome, found["a"].reason) == (FAIL, "rank 0: RuntimeError: refused")
    assert (found["b"].outcome, found["b"].reason) == (SKIPPED, "not reached: `a` failed before it")
    assert found.keys() == {"a", "b"}


def test_a_hang_and_a_process_that_never_begins_are_failures() -> None:
    lines = [(0, record(PLANNED, ["a"])), (0, record(BEGUN, "a")), (0, f'{{"{RECORD}": "ended", "value"')]
    hung = collected(1, lines, outcome_of(-9, timed_out=True))
    assert (hung["a"].outcome, hung["a"].reason) == (FAIL, "the time was up after 1 s")
    broken = collected(1, [], outcome_of(1, output="ImportError: no torch", failed=0))
    assert broken[NAME_OF_PROCESS].reason == "rank 0 ended with status 1\nImportError: no torch"
    late = collected(1, [(0, record(PLANNED, ["a"])), (0, ended("a", PASS))], outcome_of(-6, failed=0))
    assert late["a"].outcome == PASS
    assert late[NAME_OF_PROCESS].outcome == FAIL


def test_the_report_begins_with_failures_and_fits_the_terminal() -> None:
    findings = SelftestFindings(
        checks=[
            SelftestResult(part="kernels", name="good", outcome=PASS, worst_difference=0.25),
            SelftestResult(part="kernels", name="far", outcome=SKIPPED, reason="not reached: `bad` failed before it"),
            SelftestResult(part="kernels", name="bad", outcome=FAIL, reason="wrong " * 40 + "\nand [red]more[/red]"),
        ],
        bandwidths=[KernelBandwidth(f"kernel {place}", 2**20, 1e-6, place / 10) for place in range(1, 10)],
        coverage={"x": Touched(kind="CUDA kernels", all=("a.b", "a.c"), touched=("a.b",))},
        notes=["everything else: " + "no time " * 20],
    )
    console = Console(width=WIDTH, record=True, file=None, quiet=False, highlight=False)
    with console.capture() as capture:
        print_report(findings, console, 12.0)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "gradwire selftest: 1 failed, 1 passed, 1 skipped, 12 s"
    assert lines[2] == "FAILED: kernels: bad"
    assert "  and [red]more[/red]" in lines
    assert "touched 1 of 2 CUDA kernels" in lines
    assert "  not touched: a.c" in lines
    assert any("9 kernels beside a copy of as many bytes; the 4 slowest" in line for line in lines)
    kept = json.loads(json.dumps(as_record(findings, 12.0)))
    assert (kept["exit_status"], exit_status(findings)) == (1, 1)
    assert kept["coverage"]["x"] == {"touched": 1, "all": 2, "missing": ["a.c"]}
    assert kept["checks"][0] == {
        "part": "kernels",
        "name": "good",
        "outcome": PASS,
        "worst_difference": 0.25,
        "seconds": 0.0,
    }


def test_nccl_call_sites_are_found_in_the_source_and_known_again_when_called() -> None:
    source = Path(nccl.__file__).read_text().splitlines()
    written = [
        number
        for number, line in enumerate(source, start=1)
        for _ in re.findall(r"self\._group\.\w|getattr\(self\._group, ", line)
    ]
    assert [site.line for site in nccl_sites()] == written

    class Group:
        def allreduce(self, tensors: list[torch.Tensor], options: object) -> "Group":
            return self

        def wait(self) -> bool:
            return True

    touched: set[NcclSite] = set()
    group: object = RecordedGroup(Group(), touched)  # type: ignore[arg-type]
    nccl.NcclTransport(group, 0, 1).all_reduce(torch.zeros(1))  # type: ignore[arg-type]
    assert [site.call for site in touched] == ["allreduce"]
    assert touched_calls(touched).words() == f"1 of {len(nccl_sites())} NCCL call sites"
    assert len(touched_calls(touched).missing) == len(nccl_sites()) - 1
