"""Clusters of GPUs: NCCL's own model, and the law that no plan is chosen which it says is slower than NCCL's best."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comms.config import Config
from gradwire.comms.plan.chooser import COMPRESS_INSIDE_GAIN
from gradwire.comms.plan.codec_price import codec_price, square_layout
from gradwire.comms.plan.cost import EXACT
from gradwire.comms.plan.machine_cluster import cluster_of_machines
from gradwire.comms.plan.nccl_model import nccl_model
from gradwire.comms.plan.plan import NVLS, NVLS_TREE, RING, TREE, Plan
from gradwire.comms.plan.planner import HIERARCHY_HOST_SECONDS, NCCL_MINIMUM_GAIN, candidate_plans, plan_all_reduce
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.compressors import registry
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, GpuFabric, Level, Link
from gradwire.topology.fabric import NETWORK_SECONDS, sender_nics
from gradwire.topology.presets import dgx_a100, dgx_h100, p4d, pcie_box
from support.simulate import two_level_cluster

MACHINES = {"dgx_a100": dgx_a100(), "dgx_h100": dgx_h100(), "p4d": p4d(), "pcie_box": pcie_box(), "one": pcie_box(1)}
SIZES = (4, 4096, 1 << 16, 1 << 20, 5 << 20, 25 << 20, 100 << 20, 1 << 30)


def cluster_of(name: str, nodes: int, gbit: float | None = None) -> Cluster:
    return cluster_of_machines(MACHINES[name], nodes, nic_bits_per_second=None if gbit is None else gbit * 1e9)


def seconds(cluster: Cluster, name: str, nbytes: int) -> float:
    return min(plan.seconds for plan in candidate_plans(cluster, nbytes, name))


def check_choice(cluster: Cluster, nbytes: int) -> Plan:
    """The law, for one bucket."""
    plan = plan_all_reduce(cluster, nbytes, library="nccl")
    best = min(nccl_model(cluster).flat(nbytes).values())
    assert plan.seconds <= best * (1 + 1e-9)
    if plan.name == "flat":
        assert plan.chunks == 1 and plan.seconds == pytest.approx(best)
        assert not any(phase.compressor for phase in plan.phases)
    else:
        assert best - plan.seconds > max(NCCL_MINIMUM_GAIN * best, plan.chunks * HIERARCHY_HOST_SECONDS)
        assert len(cluster.nodes) > 1 and cluster.widest(0) > 1
    return plan


@pytest.mark.parametrize("gbit", [None, 400, 100, 25, 1], ids=lambda gbit: f"{gbit}gbit")
@pytest.mark.parametrize("name", MACHINES)
def test_no_plan_is_slower_than_nccls_best(name: str, gbit: float | None) -> None:
    for nodes in (1, 2, 3, 4, 8, 16):
        cluster = cluster_of(name, nodes, gbit)
        for nbytes in SIZES:
            check_choice(cluster, nbytes)


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_priced_in_the_switch_is_issued_as_the_plain_sum(name: str) -> None:
    """NVLS sums nothing else: with AVG or PreMulSum NCCL would take the ring or the tree that the price is below."""
    for nodes in (1, 2, 3, 4, 8):
        cluster = cluster_of(name, nodes)
        priced = {NVLS, NVLS_TREE} & nccl_model(cluster).flat(25 << 20).keys()
        assert bool(priced) == cluster.sums_in_switch(range(cluster.size))


links = st.floats(1e8, 1e12)
fabrics = st.builds(
    GpuFabric,
    compute_capability=st.sampled_from([70, 75, 80, 86, 89, 90, 100, 120]),
    nvlink=st.booleans(),
    nvls=st.just(False),
    ll128=st.just(False),
    amd_cpu=st.booleans(),
    network=st.sampled_from(sorted(NETWORK_SECONDS)),
    network_seconds=st.floats(0, 1e-4),
)


@given(
    fabrics,
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    links,
    links,
    st.sampled_from([1, 2, 4, 8, 9]),
    st.integers(0, 1 << 30),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_nor_on_any_other_cluster(
    fabric: GpuFabric, nodes: list[int], inside: float, outwards: float, nics: int, nbytes: int, special: bool
) -> None:
    places = [node for node, count in enumerate(nodes) for _ in range(count)]
    nic = Link(1.4e-5, outwards, nics, 2 * nics, sender_nics=sender_nics(nics, max(nodes)))
    nvls = special and fabric.nvlink and fabric.compute_capability >= 90 and max(nodes) > 1
    fabric = replace(fabric, nvls=nvls, ll128=special and fabric.nvlink)
    cluster = replace(two_level_cluster(places, Link(3.4e-6, inside), nic), fabric=fabric)
    check_choice(cluster, nbytes)
    wire = 2 * (len(nodes) - 1) / len(nodes) * nbytes / outwards
    for took in nccl_model(cluster).flat(nbytes).values():
        assert took >= wire * (1 - 1e-9)


def test_a_larger_bucket_is_never_faster() -> None:
    for name in MACHINES:
        for nodes in (1, 2, 4):
            model = nccl_model(cluster_of(name, nodes))
            for before, after in ((1 << shift, 1 << shift + 1) for shift in range(30)):
                large = model.flat(after)
                assert all(took <= large[algorithm] for algorithm, took in model.flat(before).items())


def test_figures_worked_out_by_hand_from_nccls_source() -> None:
    # DGX H100, 2 nodes, 100 MiB: NVLSTree 8 channels of 57.7 GB/s; ring Simple at NVLink's 370.8 GB/s, tree Simple at
    # 8 channels of 41.4; p4d, 4 nodes, 4 KiB: tree LL.
    nbytes = 100 << 20
    took = nccl_model(cluster_of("dgx_h100", 2)).flat(nbytes)
    assert took[NVLS_TREE] == pytest.approx(25e-6 + 2 * 20.9e-6 + nbytes * 30 / 16 / (8 * 57.7e9))
    ring = (8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6) * 1.4 + nbytes * 30 / 16 / 370.8e9
    assert took[RING] == pytest.approx(ring)
    assert took[TREE] == pytest.approx(8.4e-6 + 2 * (7 * 4e-6 + 14e-6) + nbytes / (8 * 41.4e9 / 2))
    small = nccl_model(cluster_of("p4d", 4)).flat(4096)
    bus = 48e9 * 0.92 / 3.8
    assert small[TREE] == pytest.approx(6.8e-6 + 2 * (7 * 0.6e-6 + 2 * (5e-6 + 75e-6)) + 4096 / (bus / 2))
    assert set(nccl_model(cluster_of("dgx_h100", 1)).flat(nbytes)) == {RING, TREE, NVLS}
    assert set(nccl_model(cluster_of("dgx_a100", 2)).flat(nbytes)) == {RING, TREE}


def test_a_leader_uses_the_nics_of_one_gpu_and_a_hierarchy_all() -> None:
    cluster = cluster_of("dgx_h100", 4)
    leader, hierarchical = (seconds(cluster, name, 1 << 30) for name in ("leader", "hierarchical"))
    assert leader > 4 * hierarchical
    nic = cluster.levels[1].link
    assert [nic.rate(1), nic.rate(8), nic.rate(1, spread=True)] == [48e9, 384e9, 384e9]
    one = cluster_of("dgx_a100", 4, 100).levels[1].link
    assert one.rate(1) == one.rate(8) == 12.5e9


@pytest.mark.parametrize("name", ["dgx_h100", "dgx_a100", "p4d"])
def test_fast_nics_leave_buckets_nothing_to_gain(name: str) -> None:
    for nodes in (2, 4, 8, 16):
        for nbytes in SIZES[:-1]:
            assert plan_all_reduce(cluster_of(name, nodes), nbytes, library="nccl").name == "flat"


def test_one_slow_nic_for_four_nodes_is_what_a_hierarchy_is_for() -> None:
    plan = plan_all_reduce(cluster_of("dgx_a100", 4, 25), 25 << 20, library="nccl")
    assert plan.name == "hierarchical" and "NCCL's ring" in plan.why
    two = plan_all_reduce(cluster_of("dgx_a100", 2, 25), 25 << 20, library="nccl")
    assert two.name == "flat" and "NCCL's tree" in two.why
    assert plan_all_reduce(cluster_of("dgx_a100", 4, 25), 4096, library="nccl").name == "flat"


def test_nvls_tree_sends_what_a_tree_sends() -> None:
    for nodes in (2, 3, 4, 8):
        cluster = cluster_of("dgx_h100", nodes)
        tree, nvls = (
            next(candidate_plans(cluster, 1 << 20, name)).bytes_by_level["inter_node"] for name in (TREE, NVLS_TREE)
        )
        assert nvls == pytest.approx(tree)


def test_nvls_tree_is_refused_where_no_switch_sums() -> None:
    with pytest.raises(ValueError, match="no NVSwitch"):
        next(candidate_plans(cluster_of("dgx_a100", 2), 1 << 20, NVLS_TREE))


def unknown_nic(cluster: Cluster) -> Cluster:
    inner, nic = cluster.levels
    return replace(cluster, levels=(inner, replace(nic, link=Link(1e-4, 1.25e9, presumed=True))), fabric=None)


def test_an_unknown_nic_is_flat_until_it_is_measured() -> None:
    cluster = unknown_nic(cluster_of("dgx_a100", 4))
    rank_plans = RankPlans(cluster, 0, "cuda", Config(), None)
    for nbytes in SIZES:
        plan = plan_all_reduce(cluster, nbytes, library="nccl")
        assert plan.name == "flat" and plan.chunks == 1
        assert "between the nodes" in plan.why and "`nic_bytes_per_second` gives the rates, or measures" in plan.why
    measured = tuple(replace(level, link=replace(level.link, presumed=False)) for level in cluster.levels)
    rank_plans.measured(measured)
    assert plan_all_reduce(rank_plans.cluster, 25 << 20, library="nccl").name == "hierarchical"
    assert plan_all_reduce(cluster, 25 << 20, name="hierarchical", library="nccl").name == "hierarchical"
    assert plan_all_reduce(cluster, 25 << 20, library="gloo").name == "hierarchical", "a CPU's plans stay as they are"


def test_a_measurement_takes_the_place_of_nccls_figures() -> None:
    rank_plans = RankPlans(cluster_of("dgx_a100", 4, 25), 0, "cuda", Config(), None)
    assert rank_plans.cluster.fabric is not None and "(topology)" in rank_plans.links.describe()
    rank_plans.measured(rank_plans.cluster.levels)
    assert rank_plans.cluster.fabric is None and "(probed)" in rank_plans.links.describe()


@pytest.mark.parametrize(("name", "inside"), [("pcie_box", True), ("dgx_a100", False), ("dgx_h100", False)])
def test_inside_one_node_of_gpus_compression_is_for_slow_links(name: str, inside: bool) -> None:
    cluster, layout = cluster_of(name, 1), square_layout(25 << 20)
    compressor = registry.make("int8")
    rank_plans = RankPlans(cluster, 0, "cuda", Config(compressor="int8"), compressor)
    plan = rank_plans.chooser.plan(25 << 20, layout)
    assert any(phase.compressor for phase in plan.phases) == inside
    if inside:
        exact = min(nccl_model(cluster).flat(25 << 20).values())
        assert exact / plan.seconds >= COMPRESS_INSIDE_GAIN
        presumed = tuple(replace(level, link=replace(level.link, presumed=True)) for level in cluster.levels)
        unknown = RankPlans(replace(cluster, levels=presumed, fabric=None), 0, "cuda", Config(), compressor)
        assert not any(phase.compressor for phase in unknown.chooser.plan(25 << 20, layout).phases)


def test_a_compressor_between_nodes_is_paid_in_time_and_saves_bytes() -> None:
    cluster = cluster_of("dgx_a100", 4, 25)
    exact = seconds(cluster, "hierarchical", 100 << 20)
    for name in ("bf16", "int8", "powersgd"):
        price = codec_price(name, square_layout(100 << 20), 4, 1.4e12)
        for each in (price, replace(price, exchanged=False)):
            plan = min(candidate_plans(cluster, 100 << 20, "hierarchical", 0, each), key=lambda plan: plan.seconds)
            assert exact * price.ratio < plan.seconds < exact
    assert price.name != EXACT.name


def test_a_model_is_of_two_levels() -> None:
    level = Level(LEVEL_NAMES[0], Link(1e-6, 1e9))
    with pytest.raises(ValueError, match="`cluster` has 1 levels"):
        nccl_model(Cluster(((), ()), (level,)))
