"""Laws of plans of all_gather, reduce_scatter and broadcast, on arrays: what they leave behind, and what they send."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradwire.comms.plan.collectives import (
    BROADCAST,
    CollectivePlan,
    beats_library,
    correspondents,
    library_seconds,
    plan_collective,
)
from gradwire.comms.plan.plan import ALL_GATHER, REDUCE_SCATTER, Exchange, Transfer
from gradwire.comms.plan.traffic import sole_owner
from gradwire.topology.cluster import Cluster, Link
from support.simulate import two_level_cluster

Array = NDArray[np.int64]
placements = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def cluster_of(places: list[int]) -> Cluster:
    return two_level_cluster(places, Link(20e-6, 5e9), Link(100e-6, 25e6))


def run(cluster: Cluster, plan: CollectivePlan, state: list[Array]) -> dict[int, int]:
    """Runs a plan phase by phase, all transfers of a phase on what was there before it; elements that leave a node."""
    left: Counter[int] = Counter()
    for steps in plan.chunks:
        for transfers in steps:
            before = [array.copy() for array in state]
            for transfer in transfers:
                for source, target, start, stop in messages(transfer):
                    if transfer.op == REDUCE_SCATTER:
                        state[target][start:stop] += before[source][start:stop]
                    else:
                        state[target][start:stop] = before[source][start:stop]
                    if not cluster.share_a_node((source, target)):
                        left[cluster.node_rank(source)] += stop - start
                        assert transfer.level == 1
                    else:
                        assert transfer.level == 0 and not isinstance(transfer, Exchange)
    return left


def messages(transfer: Transfer) -> list[tuple[int, int, int, int]]:
    if isinstance(transfer, Exchange):
        assert {(each.source, each.target) for each in transfer.messages} <= {
            (one, other) for one in transfer.members for other in transfer.members if one != other
        }
        assert len({(each.source, each.target) for each in transfer.messages}) == len(transfer.messages)
        return [(each.source, each.target, each.start, each.stop) for each in transfer.messages]
    assert transfer.bounds[0] == 0 and transfer.bounds[-1] == transfer.stop - transfer.start
    found = []
    for owner, rank in enumerate(transfer.members):
        start, stop = transfer.start + transfer.bounds[owner], transfer.start + transfer.bounds[owner + 1]
        assert start <= stop
        for other in transfer.members:
            if other != rank and start < stop:
                found.append((rank, other, start, stop) if transfer.op == ALL_GATHER else (other, rank, start, stop))
    return found


@settings(deadline=None, max_examples=60)
@given(places=placements, numel=st.integers(0, 40), chunks=st.integers(0, 3))
def test_every_rank_gets_every_piece_and_each_crosses_once(places: list[int], numel: int, chunks: int) -> None:
    cluster = cluster_of(places)
    expected = np.arange(cluster.size * numel)
    state = [np.full_like(expected, -1) for _ in places]
    for rank, array in enumerate(state):
        array[rank * numel : (rank + 1) * numel] = expected[rank * numel : (rank + 1) * numel]
    plan = plan_collective(cluster, ALL_GATHER, numel, 4, chunks=chunks)
    left = run(cluster, plan, state)
    assert all((array == expected).all() for array in state)
    for node, ranks in enumerate(cluster.nodes):
        assert left.get(node, 0) == (len(cluster.nodes) - 1) * len(ranks) * numel
    busiest = max(left.values(), default=0) / max(1, expected.size)
    predicted = plan.plan.bytes_by_level["inter_node"] / max(1, plan.plan.nbytes)
    assert numel == 0 or busiest == pytest.approx(predicted)


@settings(deadline=None, max_examples=60)
@given(places=placements, numel=st.integers(0, 40), chunks=st.integers(0, 3))
def test_every_rank_gets_its_sum_and_changes_what_it_says(places: list[int], numel: int, chunks: int) -> None:
    cluster = cluster_of(places)
    random = np.random.default_rng(numel)
    sources = [random.integers(0, 100, cluster.size * numel) for _ in places]
    state = [array.copy() for array in sources]
    plan = plan_collective(cluster, REDUCE_SCATTER, numel, 4, chunks=chunks)
    left = run(cluster, plan, state)
    total = np.sum(sources, axis=0)
    for rank, array in enumerate(state):
        own = slice(rank * numel, (rank + 1) * numel)
        assert (array[own] == total[own]).all()
        for start, stop in plan.own_runs(rank):
            array[start:stop] = sources[rank][start:stop]
        assert (array == sources[rank]).all()
    nodes = cluster.nodes
    for node, ranks in enumerate(nodes):
        assert left.get(node, 0) == (cluster.size - len(ranks)) * numel, "the pieces of all other nodes, once"


@settings(deadline=None, max_examples=60)
@given(places=placements, numel=st.integers(0, 400), chunks=st.integers(0, 3), data=st.data())
def test_a_broadcast_crosses_each_nic_once(places: list[int], numel: int, chunks: int, data: st.DataObject) -> None:
    cluster = cluster_of(places)
    root = data.draw(st.integers(0, cluster.size - 1))
    expected = np.arange(numel)
    state = [expected.copy() if rank == root else np.full_like(expected, -1) for rank in range(cluster.size)]
    left = run(cluster, plan_collective(cluster, BROADCAST, numel, root=root, chunks=chunks), state)
    assert all((array == expected).all() for array in state)
    assert all(sent == numel for sent in left.values())
    assert len(left) == (len(cluster.nodes) - 1 if numel else 0)


def test_equal_nodes_exchange_over_rails_and_a_route_leaves_others_out() -> None:
    cluster = cluster_of([0, 0, 1, 1, 2, 2])
    assert correspondents(cluster) == ((0, 2, 4), (1, 3, 5))
    rank_plan = plan_collective(cluster, ALL_GATHER, 1000, 4, chunks=2).rank_plan(3)
    assert rank_plan.lanes == ((0, 0), (1, 0)) and len(rank_plan.chunks) == 2
    between, inside = rank_plan.chunks[0].parts
    assert [transfer.members for transfer in between.steps[0]] == [(1, 3, 5)]
    assert all(transfer.members == (2, 3) and sole_owner(transfer.bounds) is not None for transfer in inside.steps[0])


def test_small_tensors_and_what_gloo_does_as_well_stay_with_gloo() -> None:
    contiguous, dealt, uneven = cluster_of([0, 0, 1, 1]), cluster_of([0, 1, 0, 1]), cluster_of([0, 0, 0, 1])
    large = 8 << 20
    for op in (ALL_GATHER, REDUCE_SCATTER, BROADCAST):
        assert beats_library(contiguous, op, large) and not beats_library(contiguous, op, 1000)
    assert not beats_library(dealt, BROADCAST, large), "gloo's tree crosses once"
    assert not beats_library(uneven, ALL_GATHER, large) and beats_library(uneven, REDUCE_SCATTER, large)
    ratio = library_seconds(contiguous, REDUCE_SCATTER, large) / library_seconds(contiguous, ALL_GATHER, large)
    assert ratio == pytest.approx(2.0), "an all_reduce against half of one"
    with pytest.raises(ValueError, match="`op` is 'gather'"):
        plan_collective(contiguous, "gather", 1)
