"""Law: every plan leaves the sum of all ranks on every rank, and sends exactly the bytes it predicted."""

import numpy as np
import pytest

from gradwire.comms.plan.planner import UNKNOWN_RATE_TOLERANCE, candidate_plans, plan_all_reduce
from gradwire.comms.plan.schedule import equal_partition, executable
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from support.simulate import simulate, two_level_cluster

MEMORY, NIC = Link(4e-6, 5e9), Link(30e-6, 25e6)
LEVELS = tuple(
    Level(name, link) for name, link in zip(LEVEL_NAMES, (MEMORY, NIC, Link(5e-5, 1e7), Link(1e-3, 1e6)), strict=True)
)
NODES = {
    "1x1": [0],
    "1x2": [0, 0],
    "2x1": [0, 1],
    "2x2": [0, 0, 1, 1],
    "2x2 round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "3+5": [0, 0, 0, 1, 1, 1, 1, 1],
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "2x4": [0, 0, 0, 0, 1, 1, 1, 1],
    "3+1+1 mixed": [0, 1, 2, 0, 0],
    "4x4": [r // 4 for r in range(16)],
}
CLUSTERS = {name: two_level_cluster(nodes, MEMORY, NIC) for name, nodes in NODES.items()} | {
    "one level": uniform_cluster((4,), LEVELS[:1]),
    "three levels": uniform_cluster((2, 3, 2), LEVELS[:3]),
    "four levels": uniform_cluster((2, 2, 2, 2), LEVELS),
    "one rank a node in racks": uniform_cluster((1, 2, 2), LEVELS[:3]),
    "one node a rack": uniform_cluster((2, 1, 3), LEVELS[:3]),
    "uneven racks": Cluster(((0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1)), LEVELS[:3]),
}
PLANS = ("flat", "hierarchical", "leader", "tree", "halving_doubling")


@pytest.fixture(params=CLUSTERS, ids=str)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return CLUSTERS[request.param]


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_ends_with_the_sum(cluster: Cluster, name: str) -> None:
    for numel in (0, 1, 17, 4096, 9973):
        generator = np.random.default_rng(numel)
        inputs = [generator.integers(-1000, 1000, numel) for _ in range(cluster.size)]
        for chunks in (1, 3):
            plan = plan_all_reduce(cluster, 4 * numel, name=name, chunks=chunks)
            results, _ = simulate(cluster, plan, inputs)
            for result in results:
                np.testing.assert_array_equal(result, sum(inputs), f"{numel} elements, {chunks} chunks")


@pytest.mark.parametrize("name", ["flat", "hierarchical", "leader"])
def test_equal_slices_give_the_sum_too(cluster: Cluster, name: str) -> None:
    """The partition of exact buckets on CUDA: what is left over is the last rank's."""
    for numel in (1, 15, 17, 500, 4099):
        inputs = [np.arange(numel) * (rank + 1) for rank in range(cluster.size)]
        for chunks in (1, 3):
            plan = plan_all_reduce(cluster, 4 * numel, name=name, chunks=chunks)
            for result in simulate(cluster, plan, inputs, equal_partition)[0]:
                np.testing.assert_array_equal(result, sum(inputs))


@pytest.mark.parametrize("name", PLANS)
def test_the_bytes_on_every_link_are_the_predicted_ones(cluster: Cluster, name: str) -> None:
    numel = 46080  # divisible by every group size here and by the alignment, so the prediction is exact
    plan = plan_all_reduce(cluster, 4 * numel, name=name, chunks=1)
    _, sent = simulate(cluster, plan, [np.ones(numel, dtype=np.int64)] * cluster.size)
    assert sent == pytest.approx(plan.bytes_by_level, rel=1e-4)


@pytest.mark.parametrize("name", ["flat", "hierarchical", "leader"])
def test_the_bytes_of_sums_in_rank_order_are_predicted_too(cluster: Cluster, name: str) -> None:
    numel = 46080
    plan = plan_all_reduce(cluster, 4 * numel, name=name, chunks=1)
    plan = executable(plan, cluster, "cpu", fixed_order=True)
    results, sent = simulate(cluster, plan, [np.full(numel, rank) for rank in range(cluster.size)])
    assert sent == pytest.approx(plan.bytes_by_level, rel=1e-4)
    assert all((result == sum(range(cluster.size))).all() for result in results)


@pytest.mark.parametrize(("nodes", "gain"), [(2, 1.875), (3, 1.4375), (4, 1.2917), (8, 1.125), (16, 1.0583)])
def test_bytes_saved_against_a_flat_ring_with_8_ranks_a_node(nodes: int, gain: float) -> None:
    # (1 - 1/n) / (1 - 1/N): Patarasuk and Yuan 2009 for each of the two rings.
    cluster = uniform_cluster((8, nodes), LEVELS[:2])
    flat = next(candidate_plans(cluster, 1 << 20, "flat"))
    hierarchical = next(candidate_plans(cluster, 1 << 20, "hierarchical"))
    saved = flat.bytes_by_level["inter_node"] / hierarchical.bytes_by_level["inter_node"]
    assert saved == pytest.approx(gain, rel=1e-3)


def test_a_hierarchy_sends_the_lower_bound_through_the_nic() -> None:
    for name in ("2x2", "2x2 round-robin", "3+1", "3+5", "4x2", "4x4"):
        nodes = len(set(NODES[name]))
        plan = plan_all_reduce(CLUSTERS[name], 1 << 20, name="hierarchical")
        assert plan.bytes_by_level["inter_node"] == pytest.approx(2 * (nodes - 1) / nodes * (1 << 20))


@pytest.mark.parametrize("counts", [(2, 3, 2), (4, 2, 3), (2, 2, 2, 2), (3, 2, 2, 2)])
def test_a_deep_hierarchy_sends_the_lower_bound_out_of_every_unit(counts: tuple[int, ...]) -> None:
    # A node, rack or region is one of M in the whole cluster: 2 (M - 1)/M S leave it, whatever is inside. For ranks
    # only what stays inside the node counts: reduce_scatter and all_gather, 2 (c - 1)/c S.
    numel = 55440
    cluster = uniform_cluster(counts, LEVELS[: len(counts)])
    plan = plan_all_reduce(cluster, 4 * numel, name="hierarchical", chunks=1)
    _, sent = simulate(cluster, plan, [np.ones(numel, dtype=np.int64)] * cluster.size)
    for number, level in enumerate(cluster.levels):
        units = counts[0] if number == 0 else int(np.prod(counts[number:]))
        assert sent[level.name] == pytest.approx(2 * (units - 1) / units * 4 * numel, rel=1e-2)
    assert sent == pytest.approx(plan.bytes_by_level, rel=1e-2)


def test_the_flat_plan_is_taken_where_a_hierarchy_cannot_pay() -> None:
    for name in ("1x1", "1x2", "2x1", "one level"):
        assert plan_all_reduce(CLUSTERS[name], 1 << 24).name == "flat"


@pytest.mark.parametrize("name", ["2x2", "4x4", "3+1", "2x2 round-robin", "four levels"])
def test_a_hierarchy_is_taken_where_the_nic_is_slow(name: str) -> None:
    plan = plan_all_reduce(CLUSTERS[name], 1 << 24)
    assert plan.name == "hierarchical"
    assert plan.chunks > 1


def test_a_plan_describes_itself() -> None:
    plan = plan_all_reduce(CLUSTERS["2x2"], 16_000_000)
    text = plan.describe(LEVEL_NAMES)
    assert "reduce_scatter intra_node -> all_reduce inter_node -> all_gather intra_node" in text
    assert "faster than a flat ring" in text


def test_assumed_rates_get_the_same_plan_in_more_chunks_that_cost_little() -> None:
    taken = set()
    for nodes in NODES.values():
        known = two_level_cluster(nodes, Link(20e-6, 5e9), Link(100e-6, 1.25e9))
        unknown = two_level_cluster(nodes, Link(20e-6, 5e9, presumed=True), Link(100e-6, 1.25e9, presumed=True))
        for nbytes in (100_000, 2_000_000, 16_000_000, 100_000_000):
            one, other = plan_all_reduce(known, nbytes), plan_all_reduce(unknown, nbytes)
            assert one.name == other.name
            assert one.chunks <= other.chunks
            assert other.seconds <= one.seconds * (1 + UNKNOWN_RATE_TOLERANCE)
            if other.name != "flat":
                assert plan_all_reduce(unknown, nbytes, name=other.name).chunks == other.chunks
            taken.add(other.chunks - one.chunks)
    assert len(taken) > 1


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="`plan` is 'diagonal'"):
        plan_all_reduce(CLUSTERS["2x2"], 1024, name="diagonal")
