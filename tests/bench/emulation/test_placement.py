from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.emulation.placement import place_ranks, torchrun_environment

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=6)
orders = st.sampled_from(["contiguous", "round-robin"])


@given(shapes, orders)
def test_every_chair_is_taken_once(nodes: list[int], order: str) -> None:
    placements = place_ranks(nodes, order)
    assert [placement.rank for placement in placements] == list(range(sum(nodes)))
    assert Counter(placement.node for placement in placements) == Counter(dict(enumerate(nodes)))
    assert len({(placement.node, placement.local_rank) for placement in placements}) == sum(nodes)
    assert all(
        0 <= placement.local_rank < placement.local_world_size == nodes[placement.node] for placement in placements
    )
    assert placements[0].node == placements[0].local_rank == 0


@given(shapes, orders)
def test_local_ranks_follow_ranks(nodes: list[int], order: str) -> None:
    for node in range(len(nodes)):
        on_node = [placement.local_rank for placement in place_ranks(nodes, order) if placement.node == node]
        assert on_node == sorted(on_node)


def test_round_robin_deals_like_cards() -> None:
    assert [placement.node for placement in place_ranks([2, 2], "round-robin")] == [0, 1, 0, 1]
    assert [placement.node for placement in place_ranks([3, 1], "round-robin")] == [0, 1, 0, 0]
    assert [placement.node for placement in place_ranks([3, 1])] == [0, 0, 0, 1]


def test_environment_is_torchruns() -> None:
    placements = place_ranks([3, 1])
    environment = torchrun_environment(
        placements[3], placements, master_address="10.0.0.1", master_port=29500, run_id="job"
    )
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    expected |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert expected.items() <= environment.items()


@pytest.mark.parametrize("nodes", [[], [0], [2, 0], [-1]])
def test_empty_nodes_are_refused(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`nodes`: found"):
        place_ranks(nodes)


def test_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`order`: found 'random'"):
        place_ranks([2], "random")
