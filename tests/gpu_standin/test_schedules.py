"""Any schedule: under every jitter the CPU's bits, and no deadlock where a device has no room for several kernels.

`--schedules 200` runs that many of each; the default is one of each length of delays. schedules.py runs them as a
queue that goes on where it was.
"""

from pathlib import Path

import pytest

from gpu_standin.conftest import Jobs
from gpu_standin.schedules import CASES, DEVICES, run_cases


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps for all devices what a case gives without delays."""
    return tmp_path_factory.mktemp("wanted")


@pytest.mark.parametrize("group", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_schedule_gives_the_same_bits(
    torch_jobs: Jobs, pytestconfig: pytest.Config, wanted: Path, group: str, device: str
) -> None:
    for found in run_cases(torch_jobs, group, device, pytestconfig.getoption("--schedules"), wanted):
        assert not found.problem
        assert not found.wrong, f"{found.case}: other bits from schedule {found.wrong[0]} on"
