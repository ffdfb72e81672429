"""Law: of an all_gather and a reduce_scatter the busiest NIC sends the lower bound, and a broadcast crosses it once."""

import json
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked

SCRIPT = Path(__file__).parents[1] / "jobs" / "collectives_nic_bytes_job.py"
NBYTES = 8 << 20
PLACEMENTS = {
    "2x2": [0, 1, 4, 5],
    "2x2 round-robin": [0, 4, 1, 5],
    "2x4": list(range(8)),
    "4x2": [0, 1, 4, 5, 8, 9, 12, 13],
    "4x2 round-robin": [0, 4, 8, 12, 1, 5, 9, 13],
    "3+1": [0, 1, 2, 4],
}
"""Ranks of a job on four nodes of four, in the order of the group; each group works alone, while the others wait."""


@pytest.mark.netns
def test_the_busiest_nic_sends_the_lower_bound() -> None:
    with EmulatedCluster([1] * 4) as cluster:
        result = run_forked(
            cluster,
            str(SCRIPT),
            [json.dumps(PLACEMENTS), json.dumps({"gradwire": 1}), str(NBYTES // 4)],
            nodes=[4] * 4,
            timeout_seconds=120,
        )
    result.check()
    rows = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    for name, members in PLACEMENTS.items():
        on_node = [sum(member // 4 == node for member in members) for node in range(4)]
        nodes = sum(count > 0 for count in on_node)
        # What the largest node has, every other node lacks: more than (N - 1)/N of the tensor where nodes are uneven.
        largest = (nodes - 1) * max(on_node) / len(members)
        assert largest == (nodes - 1) / nodes or name == "3+1"
        for op, share in (("all_gather", largest), ("reduce_scatter", largest), ("broadcast", 1.0)):
            measured = [row["sent"] for row in rows if row["placement"] == name and row["op"] == op]
            assert len(measured) == len(members)
            # Headers are 4 %; a broadcast is one chain of links, in which one that is late is sent again.
            most = 1.15 if op == "broadcast" else 1.05
            assert share * NBYTES < max(measured) <= most * share * NBYTES, (name, op, max(measured) / NBYTES)
