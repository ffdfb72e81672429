"""What the hook calls for a bucket on CUDA is counted; how long it takes is measured, and decides no test."""

import pytest

from gradwire.bench.studies.host_cost import COMPRESSORS, host_cost, table


def test_a_flat_bucket_is_one_call_and_nothing_else() -> None:
    cost = host_cost(2, 8, "flat", "none")
    assert cost.calls == {"allreduce": 1.0}


def test_a_hierarchical_bucket_is_three_collectives_on_one_side_stream() -> None:
    cost = host_cost(2, 8, "hierarchical", "none")
    collectives = {name: count for name, count in cost.calls.items() if " " not in name and name != "record_stream"}
    assert sum(collectives.values()) == 3
    assert cost.calls["event record"] <= 1.25  # one for the bucket, one for the step
    assert cost.calls["event wait"] == 1
    assert cost.calls["record_stream"] == 1


@pytest.mark.parametrize("compressor", [name for name in COMPRESSORS if name not in ("none", "powersgd")])
def test_a_compressed_bucket_is_at_most_two_collectives_more(compressor: str) -> None:
    exact, cost = host_cost(2, 8, "hierarchical", "none"), host_cost(2, 8, "hierarchical", compressor)
    assert sum(cost.calls.values()) <= sum(exact.calls.values()) + 2
    assert compressor in table([cost])
