"""Law: through the hook, a step sends at most 1.05 times the lower bound over the busiest NIC, on any placement."""

import json
from pathlib import Path
from typing import Literal

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked

SCRIPT = Path(__file__).parent / "jobs" / "nic_bytes_job.py"
PLACEMENTS = {
    "4x4": list(range(16)),
    "4x2": [0, 1, 4, 5, 8, 9, 12, 13],
    "2x4": list(range(8)),
    "2x2": [0, 1, 4, 5],
    "3+1": [0, 1, 2, 4],
}
"""Ranks of a job on four nodes of four; each set trains alone, while the others wait."""


@pytest.mark.netns
@pytest.mark.parametrize(
    ("nodes", "order", "placements"),
    [([4, 4, 4, 4], "contiguous", PLACEMENTS), ([2, 2], "round-robin", {"2x2 round-robin": [0, 1, 2, 3]})],
    ids=["contiguous", "round-robin"],
)
def test_the_busiest_nic_sends_the_lower_bound(
    nodes: list[int], order: Literal["contiguous", "round-robin"], placements: dict[str, list[int]]
) -> None:
    with EmulatedCluster([1] * len(nodes)) as cluster:
        result = run_forked(
            cluster, str(SCRIPT), [json.dumps(placements)], nodes=nodes, order=order, timeout_seconds=240
        )
    result.check()
    rows = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    for name, members in placements.items():
        measured = [row for row in rows if row["placement"] == name]
        assert len(measured) == len(members)
        count = len({row["node"] for row in measured})
        assert measured[0]["cluster"].startswith(f"{count} node")
        bound = 2 * (count - 1) / count * measured[0]["nbytes"]
        busiest = max(row["sent"] for row in measured)
        assert bound < busiest <= 1.05 * bound, (name, busiest / bound, measured[0])
