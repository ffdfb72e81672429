"""gradwire's hook on the real ProcessGroupNCCL: averages that are exact, on two nodes of two."""

import json

import pytest

from gpu_standin.conftest import Jobs

PLANS = [
    ("flat", 1, "float32"),
    ("hierarchical", 1, "float32"),
    ("hierarchical", 3, "float32"),
    ("hierarchical", 2, "bfloat16"),
    ("leader", 1, "float32"),
]
STEPS = 8
"""The plan's times are measured in the first steps; from the sixth on nothing is."""


@pytest.mark.parametrize(("plan", "chunks", "dtype"), PLANS)
def test_averages_are_exact(torch_jobs: Jobs, plan: str, chunks: int, dtype: str) -> None:
    ranks = torch_jobs.run("hook.py", plan, str(chunks), dtype, str(STEPS), ranks=4, NODES="aabb")
    assert ranks.statuses == [0] * 4, ranks.errors
    assert len({json.loads(output)["bits"] for output in ranks.outputs}) == 1


def test_a_script_may_have_its_tensors_made_on_the_gpu(torch_jobs: Jobs) -> None:
    ranks = torch_jobs.run("hook.py", "hierarchical", "1", "float32", str(STEPS), "cuda", ranks=4, NODES="aabb")
    assert ranks.statuses == [0] * 4, ranks.errors
