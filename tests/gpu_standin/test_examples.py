"""The examples that take a device run with `--device cuda`, and end in the words that they end in on a CPU.

The others do not take one: read_report.py and tune.py show rates and figures of a network, unchanged.py is plain DDP
with a variable, and with_*.py leave the device to their frameworks.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gpu_standin.conftest import JOBS, Jobs

EXAMPLES = JOBS.parents[2] / "examples"


def of_cpu() -> ModuleType:
    """tests/test_examples.py: how each example is run, and what it ends in."""
    spec = importlib.util.spec_from_file_location("examples_on_cpu", JOBS.parents[1] / "test_examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TAKE_A_DEVICE = sorted(file.name for file in EXAMPLES.glob("*.py") if '"--device"' in file.read_text())


@pytest.mark.parametrize("name", TAKE_A_DEVICE)
def test_it_runs_on_a_gpu(torch_jobs: Jobs, name: str) -> None:
    examples = of_cpu()
    example, command = examples.RUNS[name], examples.command(name)
    arguments = [*example.arguments.split(), "--device", "cuda"]
    ranks = torch_jobs.run(str(Path(EXAMPLES, name)), *arguments, ranks=command.ranks)
    assert ranks.statuses == [0] * command.ranks, ranks.errors
    assert example.last_words in ranks.outputs[0]
