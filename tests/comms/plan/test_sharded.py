"""What sharded training is predicted to send: counted message by message, and the laws of the recommendation."""

import gc
import math
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from gradwire.comms.plan.advise import ANY_OPTIMIZER
from gradwire.comms.plan.codec_price import CODEC_FACTS, codec_price, layout_of, settling, square_layout
from gradwire.comms.plan.cost import CodecPrice, busiest
from gradwire.comms.plan.machine_cluster import cluster_of_machines
from gradwire.comms.plan.planner import candidates
from gradwire.comms.plan.sharded import (
    FLAT,
    FULL,
    HIERARCHICAL,
    HYBRID,
    SHARDS,
    WEIGHTS,
    Leg,
    ShardedAdvice,
    ShardedCosts,
    ShardedOffer,
    ShardedWorkload,
    advise_sharded,
    step_seconds,
)
from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors import registry
from gradwire.compressors.optim.peers import carry_out
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from gradwire.topology.presets import dgx_a100, dgx_h100, pcie_box
from support.convergence_page import ended_behind
from support.simulate import Wires, two_level_cluster

INSIDE, CARD = Link(5e-6, 5e9), Link(50e-6, 25e6)
NODES = {
    "2x2": (0, 0, 1, 1),
    "2x4": (0, 0, 0, 0, 1, 1, 1, 1),
    "4x2": (0, 0, 1, 1, 2, 2, 3, 3),
    "3+1": (0, 0, 0, 1),
    "4+1+1": (0, 0, 0, 0, 1, 2),
    "round-robin": (0, 1, 2, 0, 1, 2),
    "one node": (0, 0, 0),
    "one rank each": (0, 1, 2, 3),
}
CLUSTERS = {name: two_level_cluster(nodes, INSIDE, CARD) for name, nodes in NODES.items()}
RACKS = uniform_cluster(
    (2, 3, 2), [Level(name, link) for name, link in zip(LEVEL_NAMES, (INSIDE, CARD, CARD), strict=False)]
)
CLUSTERS["2 racks of 3x2"] = RACKS
EVEN = [name for name in CLUSTERS if name not in ("3+1", "4+1+1")]

PIECES = 12
"""Of each rank's shard: a multiple of the ranks of every unit, so that a hierarchy can spread them evenly."""


def prices_for(cluster: Cluster) -> list[CodecPrice]:
    layout = square_layout(40e6)
    return [codec_price(name, layout, max(2, len(cluster.nodes)), 20e9) for name in registry.names()]


def costs(cluster: Cluster, library: str = "gloo") -> ShardedCosts:
    """Of one unit whose shards are `PIECES` float32."""
    workload = ShardedWorkload(numel=PIECES * cluster.size, units=1)
    return ShardedCosts(cluster, workload, prices_for(cluster), 20e9, library)


def busiest_bytes(cluster: Cluster, leg: Leg) -> dict[str, float]:
    return busiest(cluster, leg.moved)


def simulate_reduce_scatter(cluster: Cluster) -> dict[str, int]:
    """Runs the hierarchical reduce-scatter with real numbers, checks every sum, and counts its messages."""
    wires, size = Wires(cluster, 4), cluster.size
    state = np.random.default_rng(0).integers(-9, 9, (size, size, PIECES))
    total = state.sum(axis=0)

    def holder(ranks: tuple[int, ...], level: int, owner: int, piece: int) -> int:
        """The rank that holds a unit's sum of one piece once the unit's ranks are done."""
        if owner in ranks:
            return owner
        if level < 0:
            return ranks[0]
        chosen = ranks[(owner + piece) % len(ranks)]
        child = (chosen,) if level == 0 else cluster.ranks(cluster.unit(chosen, level - 1))
        return holder(child, level - 1, owner, piece)

    for level in range(cluster.depth):
        for (at, parent), children in cluster.children().items():
            if at == level:
                ranks = cluster.ranks(parent)
                below = [child if level == 0 else cluster.ranks(child) for child in children]
                for owner in range(size):
                    for piece in range(PIECES):
                        target = holder(ranks, level, owner, piece)
                        for child in below:
                            source = holder(child, level - 1, owner, piece)
                            if source != target:
                                wires.send(source, target, 1)
                                state[target, owner, piece] += state[source, owner, piece]
    for owner in range(size):
        assert (state[owner, owner] == total[owner]).all()
    return wires.busiest()


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_hierarchical_reduce_scatter_sends_what_was_counted(name: str) -> None:
    cluster = CLUSTERS[name]
    predicted = busiest_bytes(cluster, costs(cluster).reduce_scatter(FULL, HIERARCHICAL, "exact"))
    assert predicted == pytest.approx(simulate_reduce_scatter(cluster))


@pytest.mark.parametrize("name", NODES)
def test_a_hierarchical_all_gather_sends_what_was_counted(name: str) -> None:
    """Between nodes around a ring, rail by rail; then every rank gives its node what it has received."""
    cluster = CLUSTERS[name]
    wires, nodes = Wires(cluster, 4), cluster.nodes
    held = [{(rank, piece) for piece in range(PIECES)} for rank in range(cluster.size)]
    for owner in range(cluster.size):
        home = cluster.node_rank(owner)
        for piece in range(PIECES):
            around = [(home + step) % len(nodes) for step in range(len(nodes))]
            route = [owner, *(nodes[node][(owner + piece) % len(nodes[node])] for node in around[1:])]
            for source, target in pairwise(route):
                wires.send(source, target, 1)
                held[target].add((owner, piece))
            for source in route:
                for neighbour in nodes[cluster.node_rank(source)]:
                    if neighbour != source:
                        wires.send(source, neighbour, 1)
                        held[neighbour].add((owner, piece))
    assert all(len(pieces) == cluster.size * PIECES for pieces in held)
    predicted = busiest_bytes(cluster, costs(cluster).all_gather(FULL, HIERARCHICAL, "exact"))
    assert predicted == pytest.approx(wires.busiest())


@pytest.mark.parametrize("name", NODES)
def test_flat_collectives_send_what_was_counted(name: str) -> None:
    cluster = CLUSTERS[name]
    size, priced = cluster.size, costs(cluster)
    ring, exchange = Wires(cluster, 4), Wires(cluster, 4)
    for rank in range(size):
        for _ in range(size - 1):
            ring.send(rank, (rank + 1) % size, PIECES)
        for other in range(size):
            if other != rank:
                exchange.send(rank, other, PIECES)
    assert busiest_bytes(cluster, priced.all_gather(FULL, FLAT, "exact")) == pytest.approx(ring.busiest())
    nccl = costs(cluster, "nccl").reduce_scatter(FULL, FLAT, "exact")
    assert busiest_bytes(cluster, nccl) == pytest.approx(ring.busiest())
    twice = {level: 2 * nbytes for level, nbytes in ring.busiest().items()}
    assert busiest_bytes(cluster, priced.reduce_scatter(FULL, FLAT, "exact")) == pytest.approx(twice)
    ratio = priced.prices["int4"].ratio
    direct = {level: ratio * nbytes for level, nbytes in exchange.busiest().items()}
    assert busiest_bytes(cluster, priced.reduce_scatter(FULL, FLAT, "int4")) == pytest.approx(direct)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_hierarchy_is_at_the_bound(name: str) -> None:
    """(N - 1)/N S; with unequal nodes, what the smallest one lacks."""
    cluster = CLUSTERS[name]
    priced, nbytes = costs(cluster), 4 * PIECES * cluster.size
    bound = (1 - min(map(len, cluster.nodes)) / cluster.size) * nbytes
    if name in EVEN:
        assert bound == pytest.approx((len(cluster.nodes) - 1) / len(cluster.nodes) * nbytes)
    for leg in (priced.all_gather(FULL, HIERARCHICAL, "exact"), priced.reduce_scatter(FULL, HIERARCHICAL, "exact")):
        assert busiest_bytes(cluster, leg)["inter_node"] == pytest.approx(bound)


@pytest.mark.parametrize("name", EVEN)
def test_replicas_sum_with_the_bytes_of_the_hierarchical_plan(name: str) -> None:
    cluster = CLUSTERS[name]
    nodes, nbytes = len(cluster.nodes), 4 * PIECES * cluster.size
    for form in (FLAT, HIERARCHICAL):
        found = busiest_bytes(cluster, costs(cluster).all_reduce(form, "none")).get("inter_node", 0.0)
        assert found == pytest.approx(2 * (nodes - 1) / nodes * nbytes)
    if nodes > 1 and cluster.widest(0) > 1:
        plan = next(candidates(cluster, nbytes, "hierarchical", 1))
        assert busiest_bytes(cluster, costs(cluster).all_reduce(HIERARCHICAL, "none"))["inter_node"] == pytest.approx(
            plan.bytes_by_level["inter_node"]
        )


@pytest.mark.parametrize("form", [FLAT, HIERARCHICAL])
@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "one node"])
def test_fewer_bits_are_fewer_bytes(name: str, form: str) -> None:
    cluster = CLUSTERS[name]
    priced = costs(cluster)
    for choices, leg in ((SHARDS, priced.reduce_scatter), (WEIGHTS, priced.all_gather)):
        lossy = [busiest_bytes(cluster, leg(FULL, form, choice))["inter_node"] for choice in choices]
        pairs = list(pairwise(lossy))
        if form == FLAT and choices is SHARDS:  # the exact one is another collective: a ring
            pairs = pairs[1:]
        assert all(more > less for more, less in pairs)


@cache
def advice(name: str, sharded: str, **options: object) -> ShardedAdvice:
    cluster, library, rate = KINDS[name]()
    workload = ShardedWorkload(**{"numel": 100_000_000, "overlap": library == "nccl", **options})  # type: ignore[arg-type]
    return advise_sharded(cluster, sharded, workload, prices_for(cluster), rate, library=library)


def offer_of(advice: ShardedAdvice, name: str) -> ShardedOffer:
    return next(offer for offer in advice.offers if offer.name == name)


def gpus(machine: object, nodes: int, nic: float | None = None) -> tuple[Cluster, str, float]:
    return cluster_of_machines(machine, nodes, nic_bits_per_second=nic), "nccl", 1.4e12  # type: ignore[arg-type]


KINDS: dict[str, Callable[[], tuple[Cluster, str, float]]] = {
    **{name: (lambda name=name: (CLUSTERS[name], "gloo", 20e9)) for name in EVEN},  # type: ignore[misc]
    "4 dgx_a100 on 25 Gbit/s": lambda: gpus(dgx_a100(), 4, 25e9),
    "2 dgx_h100": lambda: gpus(dgx_h100(), 2),
    "1 dgx_h100": lambda: gpus(dgx_h100(), 1),
    "3 pcie_box": lambda: gpus(pcie_box(), 3),
}
WORKLOADS: list[dict[str, object]] = [
    {},
    {"forward_seconds": 0.05, "backward_seconds": 0.1},
    {"forward_seconds": 5.0, "backward_seconds": 10.0, "optimizer": "adamw", "param_nbytes": 2},
    {"memory_nbytes": 80e9, "reshard": "node", "reduce_nbytes": 2},
    {"memory_nbytes": 1.5e9, "reshard": "no", "backward_seconds": 1.0},
]


@pytest.mark.parametrize("options", WORKLOADS)
@pytest.mark.parametrize("sharded", [FULL, HYBRID])
@pytest.mark.parametrize("name", KINDS)
def test_the_recommendation_is_never_slower_than_exact(name: str, sharded: str, options: dict[str, object]) -> None:
    found = advice(name, sharded, **options)
    chosen = found.recommend
    assert found.why and not chosen.caution
    assert len({offer.name for offer in found.offers}) == len(found.offers)
    if found.plain.fits is not False or chosen is found.plain:
        assert chosen.step_seconds <= found.plain.step_seconds
    exact = [offer for offer in found.offers if offer.exact and offer.sharded == chosen.sharded]
    assert chosen.step_seconds <= min(offer.step_seconds for offer in exact if offer.form == FLAT)
    if options.get("memory_nbytes") is None:
        assert chosen.sharded == sharded
    for offer in found.offers:
        assert math.isfinite(offer.step_seconds) and offer.memory.extra_nbytes >= 0
        assert offer.step_seconds >= found_compute(options) and offer.exposed_seconds >= -1e-12
        assert offer.form == HIERARCHICAL or not offer.exact or offer.memory.extra_nbytes == 0
        assert sum(seconds for seconds, _ in offer.legs.values()) == pytest.approx(offer.seconds)


def found_compute(options: dict[str, object]) -> float:
    return float(options.get("forward_seconds", 0.0)) + float(options.get("backward_seconds", 0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("sharded", [FULL, HYBRID])
@pytest.mark.parametrize("name", ["one node", "1 dgx_h100"])
def test_one_node_sends_nothing_between_nodes(name: str, sharded: str) -> None:
    for offer in advice(name, sharded).offers:
        assert offer.bytes_by_level.get("inter_node", 0.0) == 0.0
        assert offer.legs["all_reduce"] == (0.0, dict.fromkeys(offer.legs["all_reduce"][1], 0.0))


def test_2x2_as_measured_and_promised() -> None:
    """Plain FSDP2 on gloo puts 3 S on the busiest card, three collectives at the bound 1.5 S."""
    found, nbytes = advice("2x2", FULL), 4e8
    assert found.plain.bytes_by_level["inter_node"] == pytest.approx(3.0 * nbytes)
    exact = offer_of(found, "full hierarchical")
    assert exact.bytes_by_level["inter_node"] == pytest.approx(1.5 * nbytes)
    assert found.plain.seconds / exact.seconds > 1.9
    least = offer_of(found, "full hierarchical shards=int4 weights=int8").bytes_by_level["inter_node"]
    assert found.plain.bytes_by_level["inter_node"] / least > 8
    replicas = advice("2x2", HYBRID)
    assert replicas.plain.bytes_by_level["inter_node"] == pytest.approx(nbytes)
    for name, ratio in (("int8", 0.27), ("int4", 0.14)):
        offer = offer_of(replicas, f"hybrid hierarchical compressor={name}")
        assert offer.bytes_by_level["inter_node"] < ratio * nbytes


def test_fast_cards_need_neither_hierarchy_nor_compression() -> None:
    found = advice("2 dgx_h100", FULL, forward_seconds=5.0, backward_seconds=10.0)
    assert found.recommend is found.plain
    assert found.why.startswith("Do not compress") and "hides" in found.why


def test_hybrid_instead_of_full_where_it_fits() -> None:
    slow = {"forward_seconds": 0.05, "backward_seconds": 0.1}
    fits = advice("4 dgx_a100 on 25 Gbit/s", FULL, memory_nbytes=80e9, **slow)
    assert fits.recommend.sharded == HYBRID and "Use hybrid instead of full" in fits.why
    unknown = advice("4 dgx_a100 on 25 Gbit/s", FULL, **slow)
    assert unknown.recommend.sharded == FULL and "--gpu-memory-gb" in unknown.why
    small = advice("4 dgx_a100 on 25 Gbit/s", HYBRID, memory_nbytes=0.15e9, **slow)
    assert small.recommend.sharded == FULL and "does not fit" in small.why
    nothing = advice("4 dgx_a100 on 25 Gbit/s", FULL, memory_nbytes=1e6, **slow)
    assert nothing.recommend is nothing.plain and nothing.why.startswith("Nothing fits")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", ANY_OPTIMIZER])
def test_nothing_is_recommended_that_the_convergence_page_calls_behind(optimizer: str) -> None:
    refused = {name for name, kind in ended_behind() if optimizer in (kind, ANY_OPTIMIZER)}
    assert ended_behind() and (refused or optimizer == "sgd")  # of all that was trained, nothing ended behind under SGD
    for name, cluster in CLUSTERS.items():
        for gbit, passes in ((0.01, (0.0, 1.0)), (0.1, (0.05,)), (1.0, (0.0, 0.05)), (10.0, (0.0, 1.0))):
            slow = replace(
                cluster, levels=(*cluster.levels[:-1], Level(cluster.levels[-1].name, Link(50e-6, gbit / 8 * 1e9)))
            )
            for backward_seconds in passes:
                load = ShardedWorkload(
                    numel=100_000_000, backward_seconds=backward_seconds, optimizer=optimizer, memory_nbytes=80e9
                )
                for sharded in (FULL, HYBRID) if name in EVEN else (FULL,):
                    found = advise_sharded(slow, sharded, load, prices_for(slow), 20e9)
                    assert found.recommend.compressor not in refused, found.recommend.name
                    assert refused & {offer.compressor for offer in found.offers} <= {
                        offer.compressor for offer in found.offers if offer.caution
                    }


def test_what_stays_after_forward_is_not_gathered_again() -> None:
    yes, no, node = (offer_of(advice("2x4", FULL, reshard=each), "full hierarchical") for each in ("yes", "no", "node"))
    assert no.legs["backward_gather"][0] == 0.0 < node.legs["backward_gather"][0] < yes.legs["backward_gather"][0]
    assert node.legs["backward_gather"][1]["inter_node"] == 0.0
    assert yes.memory.own_nbytes < node.memory.own_nbytes < no.memory.own_nbytes


def test_a_dtype_that_is_as_narrow_is_no_choice() -> None:
    names = {offer.weights for offer in advice("2x2", FULL, param_nbytes=2).offers}
    assert names == {"exact", "int8"}


def test_two_resources_take_turns() -> None:
    load = ShardedWorkload(numel=1, forward_seconds=4.0, backward_seconds=8.0, units=4)
    assert step_seconds(load, 0.0, 0.0, 0.0) == 12.0
    assert step_seconds(load, 0.5, 0.5, 0.5) == 12.0 + 1.5  # hidden but the first gathers and the last reduction
    assert step_seconds(load, 10.0, 10.0, 10.0) == 4 * 30.0 + 1.0 + 2.0  # the network is never idle but at the ends
    assert step_seconds(replace(load, overlap=False), 1.0, 1.0, 1.0) == 12.0 + 4 * 3.0


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="rectangular"):
        advise_sharded(CLUSTERS["3+1"], HYBRID, ShardedWorkload(numel=8), prices_for(CLUSTERS["3+1"]), 1e9)
    with pytest.raises(ValueError, match="`sharded` is 'zero'"):
        advise_sharded(CLUSTERS["2x2"], "zero", ShardedWorkload(numel=8), prices_for(CLUSTERS["2x2"]), 1e9)
    with pytest.raises(ValueError, match="`prices`"):
        ShardedCosts(CLUSTERS["2x2"], ShardedWorkload(numel=8), [], 1e9)
    for bad in (
        {"numel": 0},
        {"numel": 1, "units": 0},
        {"numel": 1, "reshard": "maybe"},
        {"numel": 1, "memory_nbytes": -1},
    ):
        with pytest.raises(ValueError, match=f"`{list(bad)[-1]}`"):
            ShardedWorkload(**bad)


@pytest.mark.parametrize("name", [name for name in CODEC_FACTS if name != "none"])
def test_compressors_keep_what_is_said(name: str) -> None:
    """Counts the live tensors that a compressor reaches after three steps."""
    layout, members = layout_of([("first", (128, 512)), ("second", (256, 256))]), 4
    compressor, group = settling(name), EchoGroup(members)
    for _ in range(3):
        shard = torch.randn(layout.numel)
        carry_out(compressor.all_reduce(shard, layout, group.member), group)
        compressor.end_step(True)
    everywhere, owned = CODEC_FACTS[name].kept_nbytes
    predicted = (everywhere + owned / members) * layout.numel
    assert live_nbytes(compressor) == pytest.approx(predicted, abs=0.25 * layout.numel)


def live_nbytes(root: object) -> int:
    """Bytes of all tensors that an object reaches, modules, classes and functions left out."""
    seen, waiting, storages = set[int](), [root], dict[int, int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(
            each, (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
        ):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        else:
            waiting += gc.get_referents(each)
    return sum(storages.values())
