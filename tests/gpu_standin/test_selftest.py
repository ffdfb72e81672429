"""`gradwire selftest` over the stand-in: nothing fails, and it touches every CUDA kernel and every call of NCCL."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.bench.kernels.calls import CALLS, cuda_kernels
from gradwire.bench.selftest.kernel_checks import bandwidths
from gradwire.comms.transport import nccl
from gradwire.compressors.kernels import cuda
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS

SMALL = ("--ranks", "2", "--numel", "1100", "--bandwidth-numel", "0", "--seconds", "900")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run as a user starts it."""
    file = tmp_path_factory.mktemp("selftest") / "selftest.json"
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "selftest", *SMALL, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_nothing_fails_and_what_is_skipped_needs_two_ranks(report: dict[str, Any]) -> None:
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["not_run"] == []
    parts = {check["part"] for check in report["checks"]}
    assert parts == {
        "kernels on the CPU",
        "kernels on the GPU",
        "NCCL, 1 rank",
        "NCCL, 2 ranks",
        "trainings, 2 ranks",
    }
    skipped = {(check["part"], check["reason"]) for check in report["checks"] if check["outcome"] != "pass"}
    assert skipped == {("NCCL, 1 rank", "needs two ranks: one rank has one slice")}


def test_every_kernel_is_launched(report: dict[str, Any]) -> None:
    """Every entry point of csrc/cuda, and every function of compressors/kernels/cuda that starts them."""
    entry_points = sum(map(len, ENTRY_POINTS.values()))
    assert report["coverage"]["CUDA kernels"] == {"touched": entry_points, "all": entry_points, "missing": []}
    functions = report["coverage"]["kernel functions on cuda"]
    assert functions == {"touched": len(cuda.__all__), "all": len(cuda.__all__), "missing": []}


def test_every_call_of_nccl_is_made(report: dict[str, Any]) -> None:
    """All places of the transport that call torch's group, found in its text rather than in its syntax tree."""
    text = Path(nccl.__file__).read_text()
    written = len(re.findall(r"self\._group\.\w|getattr\(self\._group, ", text))
    calls = report["coverage"]["NCCL call sites"]
    assert calls == {"touched": written, "all": written, "missing": []}
    assert written > 9


def test_the_bandwidth_of_every_kernel_is_measured() -> None:
    """The figures mean nothing here."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = [measure() for _, measure in bandwidths(cuda_kernels(device), 4096)]
    assert [row.kernel for row in rows] == list(CALLS)
    assert all(row.nbytes >= 4096 and row.seconds > 0 and row.of_copy > 0 for row in rows)
