"""Laws: a look at the links takes few bytes, all ranks see the same, and no bit of a sum depends on it."""

import re
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.fork import run_forked
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, knows_gloo_sums
from gradwire.comms.bootstrap.placement import with_node_rates
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.links import quick_probe as module
from gradwire.comms.links.first_steps import FIRST_WATCHED, STEPS_WATCHED, FirstSteps
from gradwire.comms.links.quick_probe import (
    DRAIN_NBYTES,
    LEAST_EXCHANGED_NBYTES,
    MOST_EXCHANGED_NBYTES,
    PARTNERS,
    TRIAL_NBYTES,
    quick_probe,
)
from gradwire.comms.transport import sum_order
from gradwire.comms.transport.torch_group import GlooTransport, connect_gloo
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import make_composite
from support.processes import Processes
from support.threads import run_ranks

TIMEOUT = timedelta(seconds=30)
SCRIPT = Path(__file__).parents[1] / "jobs" / "quick_probe_job.py"


def make(store: Any, nodes: str, rank: int, **options: Any) -> Communicator:
    name = options.get("compressor")
    compressor = None if name is None else make_composite(name, options.get("compressor_options", {}))
    host = options.pop("rack", "") + nodes[rank]
    config = Config(hostname=host, **{"timeout": TIMEOUT, **options})
    return Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="quick", compressor=compressor)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_unequal_owners_sum_in_the_order_of_gloos_ring(size: int) -> None:
    store = HashStore()
    cases = [(dtype, numel) for dtype in (torch.float32, torch.bfloat16, torch.float16) for numel in (1, 1000, 4097)]
    cases += [(torch.float64, 517), (torch.float32, size * 2**20 // 2 + 13)]  # more than two segments each

    def gradient(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
        return (3 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).to(dtype)

    def run(rank: int) -> None:
        group = connect_gloo(PrefixStore("ring", store), rank, size, TIMEOUT)
        for dtype, numel in cases:
            rings = ((0, numel // 3), (numel // 3, numel))
            expected, own = (gradient(rank, dtype, numel) for _ in range(2))
            for start, stop in rings:
                group.all_reduce(expected[start:stop], 0.5).wait()
            bounds = (0, *(numel * (place + 1) // (size + 2) for place in range(size - 1)), numel)
            work = group.reduce_scatter(own, bounds, 0.5, sum_order.RingOrder(rings))
            work.wait()
            work.wait()  # which adds nothing again
            mine = slice(bounds[rank], bounds[rank + 1])
            assert torch.equal(own[mine], expected[mine]), (dtype, numel)

    run_ranks(size, run)


def results_of(nodes: str, rates: list[float] | None, **options: Any) -> tuple[list[Tensor], str]:
    """What rank 0 has after some buckets, with or without these rates of the nodes; all ranks have the same."""
    store, numel, size = HashStore(), 91 * 203, len(nodes)

    def run(rank: int) -> tuple[list[Tensor], str]:
        communicator = make(store, nodes, rank, **options)
        compressor, found = communicator.compressor, []
        layout = None if compressor is None else Layout((Slice("weight", (91, 203), 0, 0, numel),))
        try:
            if rates is not None:
                levels = with_node_rates(communicator.cluster, rates).levels
                communicator.rank_plans.learned(levels, at_start=True)
            for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
                flat = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
                flat = flat if compressor is None else flat.float()
                found.append(communicator.all_reduce(flat, scale=1 / size, layout=layout).wait().clone())
                if compressor is not None:
                    compressor.end_step(True)
            return found, "\n".join(communicator.report().plans)
        finally:
            communicator.close()

    first, *others = run_ranks(size, run)
    assert all(torch.equal(mine, its) for found, _ in others for mine, its in zip(found, first[0], strict=True))
    return first


def test_a_plan_for_an_assumed_rate_says_why_the_measured_one_beside_it_does_not_count() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        communicator = make(store, "aabb", rank)
        try:
            levels = with_node_rates(communicator.cluster, [1e6, 1e6]).levels
            outer = replace(levels[1], link=replace(levels[1].link, presumed=False))
            communicator.rank_plans.learned((levels[0], outer), at_start=True)
            communicator.all_reduce(torch.ones(5000)).wait()
            return str(communicator.report())
        finally:
            communicator.close()

    for said in run_ranks(4, run):
        assert "8 Mbit/s inter_node (probed)" in said
        assert "why: Predicted faster than a flat ring at assumed rates." in said


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("abcd", {}, True),
    ("abcd", {"fusion": 1.0}, True),
    ("abcd", {"plan": "flat"}, False),
    ("aaabcc", {"plan": {"name": "hierarchical", "chunks": 3}}, True),
    ("abcabc", {"plan": "leader"}, True),
    ("aabbcc", {"plan": "flat"}, False),
    ("abc", {"compressor": "bf16"}, True),
    ("abc", {"compressor": "fp16", "compressor_options": {"plain": True, "warmup_steps": 1}}, True),
    ("abc", {"compressor": "bf16", "plan": {"chunks": 2}}, True),
    ("abc", {"compressor": "bf16", "compressor_options": {"residual": True}}, False),
    ("abc", {"compressor": "int8"}, False),
    ("abc", {"compressor": "powersgd"}, False),
]


@pytest.mark.parametrize(("nodes", "options", "owns"), CASES)
def test_no_bit_depends_on_what_was_measured(nodes: str, options: dict[str, Any], owns: bool) -> None:
    rates = [20e6, 5e6, 20e6, 15e6][: len(set(nodes))]
    without, plain = results_of(nodes, None, **options)
    with_rates, plans = results_of(nodes, rates, **options)
    assert all(torch.equal(mine, its) for mine, its in zip(without, with_rates, strict=True))
    assert "owners by their links" not in plain
    assert ("owners by their links" in plans) == owns


@pytest.mark.parametrize(
    ("nodes", "rates", "seen", "nbytes", "meetings"),
    [
        ("abcd", [25e6, 25e6, 25e6, 6.25e6], [25e6, 25e6, 25e6, 6.25e6], 500_000, PARTNERS),
        ("aaabcc", [25e6, 10e6, 24e6], [24.5e6, 9.8e6, 24.5e6], 800_000, PARTNERS),
        ("aabb", [25e6, 5e6], [5e6], 400_000, 1),
        ("abc", [25e6, 24e6, 23e6], [24e6], MOST_EXCHANGED_NBYTES, PARTNERS),
        ("abc", [1.25e6, 1.25e6, 1.25e6], [1.25e6], 100_000, PARTNERS),
        ("abc", [2.4e5, 4e5, 4e5], [2.4e5], LEAST_EXCHANGED_NBYTES, 2),  # the first node pauses in the first round
        ("abc", [1e5, 2e5, 2e5], [1e5], TRIAL_NBYTES, 1),
        ("ab", [1e5, 1e5], [1e5], TRIAL_NBYTES, 0),
        ("ab", [1e10, 1e10], [1e10], MOST_EXCHANGED_NBYTES, 1),
    ],
)
def test_its_bytes_follow_the_links(
    nodes: str, rates: list[float], seen: list[float], nbytes: int, meetings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = HashStore(), sorted(set(nodes))
    asked: list[tuple[int, int]] = []
    real = module.timed

    def timed(rail: GlooTransport, other: int, nbytes: int, saved_nbytes: int) -> tuple[float, float]:
        assert saved_nbytes == DRAIN_NBYTES
        asked.append((rail.rank, nbytes))
        assert len(real(rail, other, min(nbytes, 1 << 12), 1 << 12)) == 2
        seconds = nbytes / min(rates[rail.rank], rates[other])
        return seconds, 1e-3

    monkeypatch.setattr(module, "timed", timed)

    def run(rank: int) -> tuple[Any, ...]:
        communicator = make(store, nodes, rank)
        try:
            assert quick_probe(communicator)
            level = communicator.rank_plans.links.priced.levels[1]
            assert not level.link.presumed and communicator.cluster.levels[1].link.presumed
            assert "(probed)" in communicator.rank_plans.links.describe()
            assert communicator.all_reduce(torch.ones(1000)).wait().eq(len(nodes)).all()
            return level.unit_rates, level.link.bytes_per_second, level.link.alpha_seconds
        finally:
            communicator.close()

    first, *others = run_ranks(len(nodes), run)
    assert all(other == first for other in others)
    units, slowest, alpha = first
    assert units == (pytest.approx(seen, rel=0.03) if len(seen) > 1 else ())
    assert slowest == pytest.approx(min(seen), rel=0.03) and alpha == pytest.approx(1e-3)
    pauses = len(names) % 2
    for own in range(len(names)):
        sent = [sent for node, sent in asked if node == own]
        assert 1 + meetings - 2 * pauses <= len(sent) <= 1 + meetings
    assert len(asked) == (1 + meetings) * (len(names) - pauses)
    assert {sent for _, sent in asked} == {TRIAL_NBYTES, nbytes}


@pytest.mark.parametrize(
    ("place", "name", "replacement", "measured"),
    [
        (module, "knows_gloo_sums", lambda: False, True),
        (sum_order, "ring_runs", lambda rings, start, stop, size, element_nbytes: ((stop - start, 0),), True),
        (module, "MeetsInPairs", type(None), False),
    ],
)
def test_shares_stay_equal_where_gloos_sums_are_not_those_that_are_known(
    place: ModuleType,
    name: str,
    replacement: object,
    measured: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, rates = HashStore(), [25e6, 5e6, 25e6]
    monkeypatch.setattr(
        module, "timed", lambda rail, other, nbytes, _: (nbytes / min(rates[rail.rank], rates[other]), 1e-3)
    )
    monkeypatch.setattr(place, name, replacement)

    def run(rank: int) -> tuple[bool, tuple[float, ...]]:
        communicator = make(store, "abc", rank)
        try:
            return quick_probe(communicator), communicator.rank_plans.links.priced.levels[1].unit_rates
        finally:
            communicator.close()

    assert run_ranks(3, run) == [(measured, ())] * 3
    assert ("nodes share equally" if measured else "links are not measured") in caplog.text


def test_a_rank_that_fails_in_the_look_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, nodes, failing = HashStore(), module.timed, "aabbcc", 2  # the first of the second node
    long = timedelta(minutes=5)

    def timed(rail: GlooTransport, other: int, nbytes: int, saved_nbytes: int) -> tuple[float, float]:
        if rail.rank == 1:
            raise MemoryError("nothing left")
        return real(rail, other, nbytes, saved_nbytes)

    monkeypatch.setattr(module, "timed", timed)

    def run(rank: int) -> str:
        communicator = make(store, nodes, rank, timeout=long)
        try:
            with pytest.raises(RuntimeError) as caught:
                quick_probe(communicator)
            return str(caught.value)
        finally:
            communicator.close()

    began = time.monotonic()
    found = run_ranks(len(nodes), run)
    assert time.monotonic() - began < long.total_seconds() / 4
    assert "the measurement of the links (exchanging with node 2) failed" in found[failing]
    others = found[:failing] + found[failing + 1 :]
    assert all(re.search(f"rank {failing} (saw|aborted in) the measurement of the links", text) for text in others), (
        others
    )
    assert all("nothing left" in text for text in found)


def default_states(rank: int) -> list[str]:
    """What states that users make without an option know of the links, one after the other and two at a time."""
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    try:
        found, open_ones = [], []
        for elastic in (False, False, True, False):
            model = DistributedDataParallel(torch.nn.Linear(32, 32))
            state = gradwire.HookState(model, elastic=elastic)
            model.register_comm_hook(state, gradwire.comm_hook)
            model(torch.ones(2, 32)).sum().backward()
            found.append(str(state.report()))
            open_ones.append(state)
            if len(open_ones) == 2:
                for each in open_ones:
                    each.close()
                open_ones.clear()
        return found
    finally:
        dist.destroy_process_group()


def test_states_look_by_default_and_again_and_not_where_ranks_may_change(processes: Processes) -> None:
    first, other = processes(
        2, default_states, nodes=["one", "two"], environment={"GRADWIRE_NIC_BYTES_PER_SECOND": "auto"}
    )
    assert [["(probed)" in text for text in each] for each in (first, other)] == [[True, True, False, True]] * 2


def test_sums_in_the_order_of_rings_are_those_of_a_plan() -> None:
    store = HashStore()

    def run(rank: int) -> None:
        communicator = make(store, "abc", rank)
        try:
            communicator.rank_plans.learned(
                with_node_rates(communicator.cluster, [4e6, 1e6, 4e6]).levels, at_start=True
            )
            plan = communicator.rank_plans.plan_for(1 << 20, torch.float32, None).plan
            with pytest.raises(ValueError, match="`base` is None"):
                communicator.rank_plans.along(1 << 20, plan)
        finally:
            communicator.close()

    run_ranks(3, run)


@pytest.mark.parametrize(("version", "known"), [("2.13.0", True), ("2.15.1+cpu", True), ("2.16.0a0+gitabc", False)])
def test_the_order_of_gloos_sums_is_known_of_some_releases(version: str, known: bool) -> None:
    assert knows_gloo_sums(version) == known and knows_gloo_sums()


def test_nothing_is_measured_where_links_are_known_or_none_are_between_nodes() -> None:
    store = HashStore()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("aa", {}),
        ("ab", {"nic_bytes_per_second": 1e9}),
        ("ab", {"rack": "rack1/"}),
    ]
    for number, (nodes, options) in enumerate(cases):

        def run(
            rank: int, number: int = number, nodes: str = nodes, options: dict[str, Any] = options
        ) -> tuple[bool, str]:
            communicator = make(PrefixStore(str(number), store), nodes, rank, **options)
            try:
                return quick_probe(communicator), communicator.rank_plans.links.describe()
            finally:
                communicator.close()

        assert all(not measured and "(probed)" not in links for measured, links in run_ranks(2, run))


def test_first_steps_keep_the_proportions_that_were_seen() -> None:
    store, seen = HashStore(), [20e6, 5e6, 20e6]

    def run(rank: int) -> tuple[float, ...]:
        communicator = make(store, "abc", rank)
        try:
            rated = with_node_rates(communicator.cluster, seen).levels
            levels = tuple(replace(level, link=replace(level.link, presumed=False)) for level in rated)
            communicator.rank_plans.learned(levels, at_start=True)
            watched = FirstSteps(communicator, Agreement(store, rank, 3, "steps", TIMEOUT))
            plan = communicator.rank_plans.plan_for(1 << 20, torch.float32, None).plan
            for steps in range(FIRST_WATCHED + STEPS_WATCHED + 1):
                watched.step_began(steps)
                assert communicator.all_reduce(torch.ones(1 << 20)).wait().eq(3).all()
            after = communicator.rank_plans.plan_for(1 << 20, torch.float32, None).plan
            assert after.phases == plan.phases and after.chunks == plan.chunks and after.seconds != plan.seconds
            assert "(transfers)" in communicator.rank_plans.links.describe()
            return communicator.rank_plans.links.priced.levels[1].unit_rates
        finally:
            communicator.close()

    first, *others = run_ranks(3, run)
    assert all(other == first for other in others)
    assert [rate / first[1] for rate in first] == pytest.approx([4, 1, 4])


@pytest.mark.netns
def test_a_slow_node_owns_less_by_default_and_no_bit_tells() -> None:
    with EmulatedCluster([1, 1, 1], nic="200mbit,200mbit,20mbit") as cluster:
        result = run_forked(cluster, str(SCRIPT), [], nodes=[1, 1, 1], timeout_seconds=100)
    result.check()
    text = "\n".join(result.output)
    assert len(re.findall("default: owners by their links, probed", text)) == 3
    assert len(re.findall("not measured: equal owners, not probed", text)) == 3
    assert len(set(re.findall(r"bits (\w{64})", text))) == 1 and len(re.findall(r"bits (\w{64})", text)) == 6
