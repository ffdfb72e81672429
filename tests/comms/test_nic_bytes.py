"""Law: through the hook, a step sends at most 1.05 times the lower bound over the busiest NIC, on any placement."""

import json
from pathlib import Path
from typing import Literal

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked

SCRIPT = Path(__file__).parent / "jobs" / "nic_bytes_job.py"


@pytest.mark.netns
@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ([2, 2], "contiguous"),
        ([2, 2], "round-robin"),
        ([3, 1], "contiguous"),
        ([4, 4], "contiguous"),
        ([2, 2, 2, 2], "contiguous"),
        ([4, 4, 4, 4], "contiguous"),
    ],
    ids=["2x2", "2x2 round-robin", "3+1", "2x4", "4x2", "4x4"],
)
def test_the_busiest_nic_sends_the_lower_bound(nodes: list[int], order: Literal["contiguous", "round-robin"]) -> None:
    with EmulatedCluster([1] * len(nodes)) as cluster:
        result = run_forked(cluster, str(SCRIPT), [], nodes=nodes, order=order, timeout_seconds=240)
    result.check()
    told = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    assert len(told) == sum(nodes)
    assert told[0]["cluster"].startswith(f"{len(nodes)} node")
    bound = 2 * (len(nodes) - 1) / len(nodes) * told[0]["nbytes"]
    busiest = max(each["sent"] for each in told)
    assert bound < busiest <= 1.05 * bound, (busiest / bound, told[0])
