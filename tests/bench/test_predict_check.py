"""What is predicted for a cluster is what its network cards carry; the times stand beside it in docs/cost_model.md."""

import json
import sys

import pytest

from gradwire.bench.cluster import Cluster

pytestmark = pytest.mark.netns

NBYTES = 2_000_000


def sent(cluster: Cluster, rounds: int, compressors: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, "-m", "gradwire.bench.predict_check", "--gradient-mb", str(NBYTES / 1e6), "--rounds", str(rounds),
               "--compressors", compressors]
    result = cluster.run(command, timeout_seconds=100)
    result.check()
    lines = [line for line in result.output[0].splitlines() if line.startswith("{")]
    return result.busiest_nic_bytes, [json.loads(line) for line in lines[1:]]


def test_the_cards_carry_what_was_predicted() -> None:
    with Cluster([2, 2], nic="200mbit") as cluster:
        few, _ = sent(cluster, 1, "none")
        many, cases = sent(cluster, 1 + 4, "none")
    predicted = 4 * sum(float(str(case["nic_nbytes"])) for case in cases)
    # Headers, acknowledgements and the words of the consensus: 4 to 6 % at this size.
    assert predicted < many - few < 1.12 * predicted
    for case in cases:
        print(case["plan"], case["compressor"], "predicted / measured seconds:", case["ratio"])
        assert float(str(case["predicted_seconds"])) > 0
