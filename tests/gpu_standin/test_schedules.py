"""Any schedule: the same bits under every jitter, and no deadlock where a device has room for one kernel of NCCL.

`--schedules 200` runs that many of each; the few of the default find what is often wrong.
"""

import json

import pytest

from gpu_standin.conftest import Jobs

PLANS = ("flat", "hierarchical", "leader")
VARIABLES = {
    "free": {},
    "one kernel a device": {"GPU_STANDIN_NCCL_KERNELS": "1"},
    "memory calls wait": {"GPU_STANDIN_MALLOC_WAITS": "1", "GPU_STANDIN_POISON": "1"},
}


@pytest.mark.parametrize("device", VARIABLES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_schedule_gives_the_same_bits(
    torch_jobs: Jobs, pytestconfig: pytest.Config, plan: str, device: str
) -> None:
    count = pytestconfig.getoption("--schedules")
    ranks = torch_jobs.run("schedules.py", plan, "float32", str(count), ranks=4, NODES="aabb", **VARIABLES[device])
    assert ranks.statuses == [0] * 4, ranks.errors
    bits = [bit for output in ranks.outputs for bit in json.loads(output.splitlines()[-1])["bits"]]
    assert len(bits) == 4 * count
    assert len(set(bits)) == 1
