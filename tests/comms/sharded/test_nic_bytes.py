"""Law: a step of sharded training on 2 nodes of 2 puts on the busiest NIC what was predicted, and its headers.

The shares hold headers and acknowledgements; the kernel counts them on the emulated network card.
"""

import json
from pathlib import Path

import pytest

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.comms.plan.codec_price import codec_price, square_layout
from gradwire.comms.plan.sharded import FULL, ShardedWorkload, advise_sharded
from gradwire.topology.cluster import Link
from support.simulate import two_level_cluster

SCRIPT = Path(__file__).parents[1] / "jobs" / "sharded_nic_bytes_job.py"
SHARES = {
    "HSDP exact": 1.05,
    "HSDP int8": 0.27,
    "HSDP int4": 0.14,
    "FSDP exact exact": 3 / 2 * 1.05,
}
"""Most of the model's float32 bytes that a node may send: what was promised."""
OFFERS = {
    "HSDP exact": "hybrid hierarchical",
    "HSDP int8": "hybrid hierarchical compressor=int8",
    "HSDP int4": "hybrid hierarchical compressor=int4",
    "FSDP exact exact": "full hierarchical",
    "FSDP bf16 bf16": "full hierarchical shards=bf16 weights=bf16",
    "FSDP int8 int8": "full hierarchical shards=int8 weights=int8",
    "FSDP int4 int8": "full hierarchical shards=int4 weights=int8",
}
"""What `gradwire predict --sharded` calls the same."""
HEADERS = 0.07
"""Of Ethernet, IP and TCP, acknowledgements, and what is sent again."""


def predicted(numel: int) -> dict[str, float]:
    """Bytes that leave the busiest node in a step, by the name of an offer."""
    cluster = two_level_cluster((0, 0, 1, 1), Link(5e-6, 5e9), Link(50e-6, 25e6))
    layout = square_layout(float(numel))
    prices = [codec_price(name, layout, 2, 20e9) for name in ("bf16", "int8", "int4")]
    advice = advise_sharded(cluster, FULL, ShardedWorkload(numel=numel, units=1), prices, 20e9)
    return {offer.name: offer.bytes_by_level["inter_node"] for offer in advice.offers}


@pytest.mark.netns
def test_the_busiest_nic_sends_the_payloads_once() -> None:
    with EmulatedCluster([1, 1]) as cluster:
        result = run_forked(cluster, str(SCRIPT), [], nodes=[2, 2], timeout_seconds=240)
    result.check()
    rows = [json.loads(line) for text in result.output for line in text.splitlines() if line.startswith("{")]
    busiest: dict[str, float] = {}
    for row in rows:
        busiest[row["name"]] = max(busiest.get(row["name"], 0.0), row["sent"] / row["nbytes"])
    nbytes = rows[0]["nbytes"]
    priced = predicted(nbytes // 4)
    for name, offer in OFFERS.items():
        assert priced[offer] <= busiest[name] * nbytes <= (1 + HEADERS) * priced[offer], (name, busiest, priced[offer])
    over = {name: busiest[name] for name, share in SHARES.items() if busiest[name] > share}
    assert not over, (over, busiest)
    assert busiest["HSDP exact"] <= busiest["HSDP native"] * 1.01
    assert busiest["FSDP native"] > 6 * busiest["FSDP int4 int8"]
