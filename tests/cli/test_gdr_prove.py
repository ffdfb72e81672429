"""The all-reduce that `gdr-check --prove` runs, with Gloo in the place of NCCL."""

import json
import subprocess
import sys

import pytest
import torch

from gradwire.cli.gdr_prove import main


def test_two_ranks_under_torchrun() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "gradwire.cli.gdr_prove", "--backend=gloo", "--nbytes=65536", "--label=test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.replace("}{", "}\n{").splitlines() if line.startswith("{")]
    assert len(results) == 2 and all(result["gigabits_per_second"] > 0 for result in results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_reason_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 3
    assert "no CUDA device" in json.loads(capsys.readouterr().out)["error"]
