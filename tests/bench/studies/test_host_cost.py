"""What the hook calls for a bucket on CUDA is counted; how long it takes is measured, and decides no test."""

import pytest

from gradwire.bench.studies.host_cost import COMPRESSORS, HostCost, host_cost, table


@pytest.fixture(scope="module")
def exact() -> HostCost:
    return host_cost(2, 8, "hierarchical", "none", rounds=1)


def test_a_flat_bucket_is_one_call_and_nothing_else() -> None:
    cost = host_cost(2, 8, "flat", "none", rounds=1)
    assert cost.calls == {"allreduce": 1.0}


def test_a_hierarchical_bucket_is_three_collectives_on_one_side_stream(exact: HostCost) -> None:
    collectives = {name: count for name, count in exact.calls.items() if " " not in name and name != "record_stream"}
    assert sum(collectives.values()) == 3
    assert exact.calls["event record"] <= 1.25  # one for the bucket, one for the step
    assert exact.calls["event wait"] == 1
    assert exact.calls["record_stream"] == 1


@pytest.mark.parametrize("compressor", [name for name in COMPRESSORS if name not in ("none", "powersgd")])
def test_a_compressed_bucket_is_at_most_two_collectives_more(exact: HostCost, compressor: str) -> None:
    cost = host_cost(2, 8, "hierarchical", compressor, rounds=1)
    assert sum(cost.calls.values()) <= sum(exact.calls.values()) + 2
    assert compressor in table([cost])
