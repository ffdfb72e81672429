"""Law: a step of sharded training on 2 nodes of 2 sends no more over the busiest NIC than its payloads.

The shares hold headers and acknowledgements; the kernel counts them on the emulated network card.
"""

import json
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked

SCRIPT = Path(__file__).parents[1] / "jobs" / "sharded_nic_bytes_job.py"
SHARES = {
    "HSDP exact": 1.05,
    "HSDP int8": 0.27,
    "HSDP int4": 0.14,
    "FSDP exact exact": 3 / 2 * 1.05,
    "FSDP bf16 bf16": 3 / 4 * 1.05,
    "FSDP int8 int8": 3 / 8 * 1.07,
    "FSDP int4 int8": (2 / 8 + 1 / 16) * 1.07,
}
"""Most of the model's float32 bytes that a node sends. Replicas: each node sends its sums of all shards once. Shards:
half of the gradients, and half of the weights twice."""


@pytest.mark.netns
def test_the_busiest_nic_sends_the_payloads_once() -> None:
    with EmulatedCluster([1, 1]) as cluster:
        result = run_forked(cluster, str(SCRIPT), [], nodes=[2, 2], timeout_seconds=240)
    result.check()
    rows = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    busiest: dict[str, float] = {}
    for row in rows:
        busiest[row["name"]] = max(busiest.get(row["name"], 0.0), row["sent"] / row["nbytes"])
    over = {name: busiest[name] for name, share in SHARES.items() if busiest[name] > share}
    assert not over, (over, busiest)
    assert busiest["HSDP exact"] <= busiest["HSDP native"] * 1.01
    assert busiest["FSDP native"] > 6 * busiest["FSDP int4 int8"]
