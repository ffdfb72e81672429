"""DDP's own reducer on the stand-in: the models of all ranks end the same, and as on the CPU."""

import json
from typing import Any

import pytest

from gpu_standin.conftest import Jobs

OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"backend": "gradwire"},
    {"compressor": "bf16"},
]
STEPS = 5


def train(jobs: Jobs, device: str, plan: str, options: dict[str, Any], **environment: str) -> dict[str, Any]:
    """What a job of two nodes of two ends with; the same on all ranks."""
    ranks = jobs.run("ddp.py", device, plan, json.dumps(options), str(STEPS), ranks=4, NODES="aabb", **environment)
    assert ranks.statuses == [0] * 4, ranks.errors
    results = [json.loads(output.splitlines()[-1]) for output in ranks.outputs]
    assert len({result["bits"] for result in results}) == 1
    return dict(results[0])


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_ranks_end_with_the_model_of_the_cpu(torch_jobs: Jobs, plan: str, options: dict[str, Any]) -> None:
    on_gpu = train(torch_jobs, "cuda", plan, options)
    on_cpu = train(torch_jobs, "cpu", plan, {key: value for key, value in options.items() if key != "backend"})
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=1e-5 if "compressor" not in options else 1e-3)
