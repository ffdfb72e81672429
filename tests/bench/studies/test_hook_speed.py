"""One bucket through the hook: the bytes on the busiest network card, beside their lower bound."""

import pytest

from gradwire.bench.studies import hook_speed


@pytest.mark.netns
def test_hook_speed_counts_the_lower_bound() -> None:
    results = {one.name: one for one in hook_speed.measure("3+1", "1gbit", 1_000_000, 1)}
    assert results[hook_speed.GRADWIRE].nic_share < 1.15
    assert results[hook_speed.PLAIN].nic_share > 1.4
