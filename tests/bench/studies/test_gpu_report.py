"""The report about a GPU: what can be seen of it without one."""

import pytest
import torch
from torch import nn

from gradwire.bench.kernels.command import KernelResult
from gradwire.bench.studies.gpu import step as gpu_step
from gradwire.bench.studies.gpu.report import main, row, step_lines
from gradwire.bench.studies.gpu.step import StepCost, residual_network


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "gpu_report: no CUDA" in capsys.readouterr().err


def test_the_lines_are_rows_of_markdown() -> None:
    result = KernelResult("pack", 8 * 2**20, 4e-6, 1e-5, 2.097e12, 0.9, 2.5)
    assert row(result, 1) == "| pack | 4.0 | 2097 | 0.90 | 2.5 | 1 |"
    lines = list(step_lines(StepCost(0.1, 0.101, ())))
    assert lines[-1] == "| 100.00 | 101.00 | 1.00% | none |"
    assert all(line.count("|") == lines[-1].count("|") for line in lines[1:])


def test_the_network_has_the_published_parameters() -> None:
    with torch.device("meta"):
        network = residual_network()
    assert sum(weight.numel() for weight in network.parameters()) == 25_557_032
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_steps_are_taken_in_a_world_of_one_rank() -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))

    cost = gpu_step.measure(torch.device("cpu"), small, image=8, batch=2, rounds=1)
    assert cost.bare_seconds > 0
    assert cost.hook_seconds > 0
    assert cost.blocking == ()
    assert not torch.distributed.is_initialized()
