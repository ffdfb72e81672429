"""Any schedule: under every jitter the CPU's bits, and no deadlock where a device has no room for several kernels.

`--schedules 200` runs that many of each; the default is one of each length of delays.
"""

import json
from dataclasses import replace

import pytest

from gpu_standin.conftest import Jobs
from gpu_standin.test_trainings import (
    APART,
    BACKEND,
    COMPRESSED,
    EXACT,
    GROUPS,
    OTHER_ORDER,
    SHARDED,
    Settings,
)

IN_ORDER, IN_TURNS = ({"NCCL_LAUNCH_ORDER_IMPLICIT": value} for value in "10")
"""Who keeps the order: NCCL, or gradwire's events. Where NCCL has run before a hook is made, as in DDP's constructor,
only the environment can ask NCCL for it; elsewhere gradwire asks, unless the environment says no."""
DEVICES: dict[str, dict[str, str]] = {
    "room for all": {},
    "one kernel": IN_ORDER | {"GPU_STANDIN_NCCL_KERNELS": "1"},
    "few multiprocessors": IN_TURNS | {"GPU_STANDIN_SMS": "28"},
    "memory calls wait": IN_ORDER | {"GPU_STANDIN_MALLOC_WAITS": "1", "GPU_STANDIN_POISON": "1"},
}
"""What a device is like. Of 28 multiprocessors two kernels of 24 and 8 thread blocks do not both have enough."""
CASES: dict[str, dict[str, Settings]] = {
    "exact": EXACT,
    "compressed": COMPRESSED,
    "backend": BACKEND,
    "sharded": SHARDED,
    "apart": APART,
}
OF_A_SCHEDULE = 3.0
"""Seconds that a schedule may take on average, on a machine that does much else."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", CASES)
def test_every_schedule_gives_the_same_bits(
    torch_jobs: Jobs, pytestconfig: pytest.Config, group: str, device: str
) -> None:
    count = pytestconfig.getoption("--schedules")
    backend, kind, cases = GROUPS[group]
    listed = [[name, {"kind": kind, "reference": reference(group, name)} | case] for name, case in cases.items()]
    jobs = replace(torch_jobs, seconds=120 + OF_A_SCHEDULE * count * len(cases))
    ranks = jobs.run("schedules.py", backend, str(count), json.dumps(listed), ranks=4, NODES="aabb", **DEVICES[device])
    assert ranks.statuses == [0] * 4, (ranks.outputs[0][-300:], ranks.errors)
    for number, output in enumerate(ranks.outputs):
        found = dict(map(json.loads, output.splitlines()))
        assert found.keys() == cases.keys()
        for name, bits in found.items():
            assert len(bits["delayed"]) == count
            wrong = [each for each in range(count) if bits["delayed"][each] != bits["wanted"][each]]
            assert not wrong, f"{name}: rank {number} has other bits from schedule {wrong[0]} on"


def reference(group: str, case: str) -> str:
    """Whose bits a case has: the CPU's, or where sums have another order there its own without delays."""
    return "cuda" if f"{group} {case}" in OTHER_ORDER or "powersgd" in case else "cpu"
