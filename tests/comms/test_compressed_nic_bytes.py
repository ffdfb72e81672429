"""Law: a compressed step of the hook on 2 nodes sends no more over the busiest NIC than its share of the gradient.

The shares hold headers, acknowledgements and the dense bias; the kernel counts them on the emulated network card.
"""

import json
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked

SCRIPT = Path(__file__).parent / "jobs" / "compressed_nic_bytes_job.py"
SHARES = {
    "none": 1.05,
    "fp16": 0.53,
    "bf16": 0.53,
    "int8": 0.27,
    "int4": 0.14,
    "waterfill5": 0.167,
    "waterfill4": 0.135,
    "waterfill3": 0.104,
    "waterfill2": 0.073,
    "onebit": 0.035,
    "dgc": 0.03,
    "powersgd": 0.012,
}
"""Most of the gradient's bytes that a node sends; powersgd at rank 4, dgc at a hundredth."""


@pytest.mark.netns
def test_the_busiest_nic_sends_the_compressors_share() -> None:
    with EmulatedCluster([1, 1]) as cluster:
        result = run_forked(cluster, str(SCRIPT), [], nodes=[2, 2], timeout_seconds=600)
    result.check()
    rows = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    busiest = {
        name: max(each["sent"] / each["nbytes"] for each in rows if each["compressor"] == name) for name in SHARES
    }
    assert len(rows) == 4 * len(SHARES)
    over = {name: share for name, share in busiest.items() if share > SHARES[name]}
    assert not over, (over, busiest)
    payload_alone = {
        "fp16": 0.5,
        "int4": 1 / 8,
        "waterfill5": 5 / 32,
        "onebit": 1 / 32,
        "dgc": 0.02,
        "powersgd": 4 * 2 / 1024,
    }
    assert all(busiest[name] > least for name, least in payload_alone.items()), busiest
