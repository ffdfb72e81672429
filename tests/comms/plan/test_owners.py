"""Laws of unequal shares: none are done sooner, every link carries what its unit owns, no bit depends on them."""

import random
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.chooser import PlanChooser
from gradwire.comms.plan.cost import EXACT, CodecPrice, CostModel
from gradwire.comms.plan.machine_cluster import cluster_of_machines
from gradwire.comms.plan.owners import UNITS_PER_MEMBER, owner_shares
from gradwire.comms.plan.plan import ALL_REDUCE
from gradwire.comms.plan.planner import (
    MINIMUM_CHUNK_NBYTES,
    OWNERS_CHUNK_NBYTES,
    OWNERS_CHUNK_SECONDS,
    candidate_plans,
    plan_all_reduce,
)
from gradwire.comms.plan.schedule import executable
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import make_composite
from gradwire.compressors.registry import names
from gradwire.topology.cluster import Cluster, Level, Link
from gradwire.topology.presets import dgx_h100
from support.simulate import Wires, simulate, two_level_cluster
from support.threads import run_ranks

INSIDE, CARD = Link(20e-6, 5e9), Link(100e-6, 25e6)
FAST, SLOW = 25e6, 25e6 / 4


def nodes_of(rates: list[float], ranks: int) -> Cluster:
    places = [node for node in range(len(rates)) for _ in range(ranks)]
    return with_node_rates(two_level_cluster(places, INSIDE, CARD), rates)


def seconds(shares: tuple[int, ...], rates: tuple[float, ...], further: float = 0.0) -> float:
    owning = len(rates) - 2 + further
    return max((1 + owning * share / sum(shares)) / rate for share, rate in zip(shares, rates, strict=True))


@pytest.mark.parametrize("further", [0.0, 1.5])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_no_other_shares_are_done_sooner(count: int, further: float) -> None:
    draw = random.Random(count)
    for _ in range(50):
        rates = tuple(draw.choice([1.0, 2.0, 4.0, 10.0]) * draw.uniform(0.8, 1.2) for _ in range(count))
        shares = owner_shares(rates, further) or (1,) * count
        best = seconds(shares, rates, further)
        for _ in range(50):
            others = tuple(draw.randrange(1, 100) if draw.random() < 0.8 else 0 for _ in range(count))
            if any(others):
                assert best <= seconds(others, rates, further) * (1 + 1 / UNITS_PER_MEMBER)
        assert best <= seconds((1,) * count, rates, further) * (1 + 1 / UNITS_PER_MEMBER)


def test_links_that_are_alike_or_two_units_share_equally() -> None:
    assert owner_shares((FAST,) * 4) == owner_shares((FAST, FAST * 1.04, FAST)) == owner_shares((FAST, SLOW)) == ()


@pytest.mark.parametrize(("count", "ranks", "gain"), [(4, 1, 1.40), (4, 2, 1.40), (8, 1, 1.60), (8, 2, 1.60)])
def test_one_link_at_a_quarter_of_the_rate(count: int, ranks: int, gain: float) -> None:
    """Bounds: 1.5 for 4 nodes, 1.75 for 8. Every link is within 1.05 of its own optimum."""
    cluster, numel = nodes_of([FAST] * (count - 1) + [SLOW], ranks), 65536 * 4
    plan = plan_all_reduce(cluster, 4 * numel * 16)
    equal = plan_all_reduce(nodes_of([SLOW] * count, ranks), 4 * numel * 16)
    assert plan.seconds * gain <= equal.seconds
    wires, inputs = Wires(cluster, 4), [np.full(numel, rank) for rank in range(cluster.size)]
    results, _ = simulate(cluster, executable(plan, cluster, "cpu", fixed_order=False), inputs, wires=wires)
    assert all((result == sum(range(cluster.size))).all() for result in results)
    optimum = [1 + (count - 2) / (count - 1)] * (count - 1) + [1.0]
    for node, best in enumerate(optimum):
        assert wires.egress[1, (node,)] <= 1.05 * best * 4 * numel


@pytest.mark.parametrize("rates", [[4e7, 1e7, 3e7, 4e7], [4e7, 2e7, 1e7, 2e7]])
def test_the_cost_model_books_the_bytes_that_the_simulator_counts(rates: list[float]) -> None:
    cluster, numel = nodes_of(rates, 2), 65536
    plan = executable(
        plan_all_reduce(cluster, 4 * numel, name="hierarchical", chunks=1), cluster, "cpu", fixed_order=False
    )
    wires = Wires(cluster, 4)
    simulate(cluster, plan, [np.zeros(numel, dtype=np.int64)] * 8, wires=wires)
    between = next(phase for phase in plan.phases if phase.op == ALL_REDUCE)
    booked = CostModel.of(cluster, plan.phases).phase(between).egress.nbytes[1]
    for node, share in enumerate(booked):
        assert wires.egress[1, (node,)] == pytest.approx(share * 4 * numel, rel=0.01)


def test_where_sums_have_equal_parts_payloads_alone_go_by_the_links() -> None:
    """As with NCCL: exact phases are planned and priced as where every link is the slowest one."""
    rates, nbytes = [FAST, FAST, FAST, SLOW], 16 << 20
    for ranks, places in ((1, None), (2, None), (2, [(0, 0), (0, 1), (1, 0), (1, 1)])):
        cluster, slowest = (nodes_of(each, ranks) for each in (rates, [SLOW] * 4))
        if places is not None:
            racks = Cluster(
                tuple(places), tuple(Level(name, link) for name, link in zip("abc", (INSIDE, CARD, CARD), strict=True))
            )
            cluster, slowest = with_node_rates(racks, rates), with_node_rates(racks, [SLOW] * 4)
        cluster = replace(cluster, equal_sums=True)
        for library in ("gloo", "nccl"):
            plan, equal = (plan_all_reduce(each, nbytes, library=library) for each in (cluster, slowest))
            assert not any(phase.shares for phase in plan.phases)
            if places is None and library == "gloo":  # NCCL's tree may have the slow node at its end
                assert replace(plan, why="") == replace(equal, why="")
        by_owners, half, gathered = (
            next(candidate_plans(cluster, nbytes, "hierarchical", 16, CodecPrice("x", 0.25, owned=owned)))
            for owned in (1.0, 0.5, 0.0)
        )
        price = CodecPrice("x", 0.25)
        everything = next(candidate_plans(replace(cluster, equal_sums=False), nbytes, "hierarchical", 16, price))
        nothing = next(candidate_plans(slowest, nbytes, "hierarchical", 16, price))
        shared = [phase.shares for phase in by_owners.phases]
        assert shared == [phase.shares if phase.compressor else () for phase in everything.phases]
        if places is None:
            assert any(shared) and by_owners.seconds == everything.seconds
            assert by_owners.seconds < half.seconds < gathered.seconds
            assert gathered.seconds == pytest.approx(nothing.seconds)
            assert gathered.bytes_by_level == pytest.approx(nothing.bytes_by_level)
        assert not any(phase.shares for phase in gathered.phases)


def test_the_plans_of_one_case_are_as_the_changelog_says() -> None:
    """A plan decides where payloads begin, and with that the last bits of compressed runs: not to change by chance."""
    cluster = nodes_of([FAST, FAST, FAST, SLOW], 1)
    for price, chunks in ((EXACT, 64), (CodecPrice("int8", 0.25, 1e-10), 32)):
        plan = plan_all_reduce(cluster, 8 << 20, name="hierarchical", price=price)
        assert (plan.name, plan.chunks) == ("hierarchical", chunks)
        (phase,) = plan.phases
        assert (phase.op, phase.level, phase.shares) == (ALL_REDUCE, 1, (22, 21, 21, 0))


@pytest.mark.parametrize("nodes", [4, 8])
def test_payloads_go_by_the_links_only_where_that_is_quicker(nodes: int) -> None:
    """By NCCL's model, what is taken is never slower than equal parts; both are taken somewhere."""
    cluster = with_node_rates(cluster_of_machines(dgx_h100(), nodes), [384e9] * (nodes - 1) + [96e9])
    taken = set()
    for nbytes in (1 << 20, 25 << 20, 256 << 20, 1 << 30):
        for ratio, owned in ((0.26, 1.0), (0.26, 0.5), (0.04, 1.0)):
            for chunks in (0, 1, 4):
                price = CodecPrice("x", ratio, 1e-12, owned=owned)
                plan, equal, shared = (
                    min(
                        candidate_plans(cluster, nbytes, "hierarchical", chunks, price, by_links=by_links),
                        key=lambda each: each.seconds,
                    )
                    for by_links in (None, False, True)
                )
                assert plan.seconds == min(equal.seconds, shared.seconds)
                assert plan in (equal, shared) and not any(phase.shares for phase in equal.phases)
                taken.add(any(phase.shares for phase in plan.phases))
                best = plan_all_reduce(cluster, nbytes, name="hierarchical", chunks=chunks, price=price, library="nccl")
                assert best.seconds == plan.seconds
    assert taken == {False, True}


def test_the_reason_is_of_the_plan_that_the_owners_make() -> None:
    """Between nodes of one rank the flat plan gets owners, and is a hierarchy of one phase then."""
    rates = [25e6, 25e6, 25e6, 6e6]
    links: Any = SimpleNamespace(cluster=nodes_of([25e6] * 4, 1), shares=nodes_of(rates, 1))
    chooser = PlanChooser(links, Config(), None, None, "gloo")
    flat = chooser.plan(1 << 20, None)
    owned = chooser.with_owners(flat, None)
    assert owned is not None and (flat.name, owned.name) == ("flat", "hierarchical")
    assert [phase.op for phase in owned.phases] == [ALL_REDUCE] and "every plan is one all-reduce" in owned.why


def run_with(rates: list[float], ranks: int, compressor: str | None, steps: int) -> list[list[Tensor]]:
    """What each rank has after each of some steps on nodes whose links have these rates."""
    store, size, numel = HashStore(), len(rates) * ranks, 347 * 203

    def body(rank: int) -> list[Tensor]:
        config = Config(
            hostname=f"node{rank // ranks}", timeout=timedelta(seconds=20), plan={"name": "hierarchical", "chunks": 2},
            nic_bytes_per_second=rates[rank // ranks], compressor=compressor,
        )  # fmt: skip
        made = None if compressor is None else make_composite(compressor, {})
        communicator = Communicator(store, rank, size, torch.device("cpu"), config, name="owners", compressor=made)
        layout, results = Layout((Slice("weight", (347, 203), 0, 0, numel),)) if made is not None else None, []
        try:
            for step in range(steps):
                flat = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))
                results.append(communicator.all_reduce(flat, scale=1 / size, layout=layout).wait().clone())
                if made is not None:
                    made.end_step(True)
        finally:
            communicator.close()
        return results

    return run_ranks(size, body)


@pytest.mark.parametrize("compressor", [None, *(name for name in names() if name != "none")])
def test_no_bit_depends_on_the_shares(compressor: str | None) -> None:
    slow, other = ([4e7, 1e7, 4e7], [2e7, 4e7, 3e7])
    first, second = (run_with(rates, 1, compressor, 3) for rates in (slow, other))
    for results in (*first, *second):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, first[0], strict=True))
    if compressor is None:
        gradients = [torch.randn(70_441, generator=torch.Generator().manual_seed(rank)) / 3 for rank in range(3)]
        torch.testing.assert_close(first[0][0], sum(gradients, torch.zeros(70_441)))


def test_nothing_held_back_is_lost_where_the_shares_change() -> None:
    store, size, numel, layout = HashStore(), 4, 20_000, Layout((Slice("weight", (20_000,), 0, 0, 20_000),))
    faster = [4e7, 1e7, 4e7, 3e7], [1e7, 4e7, 2e7, 4e7]

    def body(rank: int) -> tuple[Tensor, Tensor]:
        config = Config(
            hostname=str(rank), timeout=timedelta(seconds=20), compressor="int4", nic_bytes_per_second=faster[0][rank]
        )
        made = make_composite("int4", {})
        communicator = Communicator(store, rank, size, torch.device("cpu"), config, name="change", compressor=made)
        given, taken = torch.zeros(numel), torch.zeros(numel)
        try:
            for step in range(6):
                if step == 3:
                    changed = with_node_rates(communicator.cluster, faster[1])
                    communicator.rank_plans.measured(changed.levels)
                flat = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))
                given += flat
                taken += communicator.all_reduce(flat, layout=layout, flush=step == 5).wait()
                made.end_step(True)
        finally:
            communicator.close()
        return given, taken

    results = run_ranks(size, body)
    assert all(torch.equal(taken, results[0][1]) for _, taken in results)
    torch.testing.assert_close(results[0][1], sum((given for given, _ in results), torch.zeros(numel)))


@pytest.mark.parametrize("count", [3, 4, 8])
def test_chunks_of_unequal_owners_are_as_small_as_their_slowest_link_bears(count: int) -> None:
    for slow in (1e5, 6.25e6, 12.5e6, 1e9):
        cluster = nodes_of([4 * slow] * (count - 1) + [slow], 1)
        for nbytes in (100_000, 1_000_000, 8_000_000, 64_000_000):
            plan = plan_all_reduce(cluster, nbytes, name="hierarchical")
            least = min(MINIMUM_CHUNK_NBYTES, max(OWNERS_CHUNK_NBYTES, OWNERS_CHUNK_SECONDS * slow))
            assert plan.chunks == 1 or nbytes / plan.chunks >= least
            if (
                nbytes >= 64 * least and slow < 1e9
            ):  # many chunks: two stages after one another nearly take the time of one
                alone = plan_all_reduce(cluster, nbytes, name="hierarchical", chunks=1)
                assert plan.seconds < 0.6 * alone.seconds
