"""Prices come from the compressors themselves, not from a table beside them."""

import pytest
import torch

from gradwire.comms.config import Config
from gradwire.comms.plan import codec_price as price_module
from gradwire.comms.plan.advise import Workload, advise
from gradwire.comms.plan.codec_price import (
    CODEC_FACTS,
    CPU_BYTES_PER_SECOND,
    alone,
    codec_price,
    final,
    layout_of,
    measured_price,
    square_layout,
    wire_ratio,
)
from gradwire.comms.plan.cost import CodecPrice
from gradwire.comms.plan.payloads import NEVER, packing_break_even
from gradwire.comms.plan.planner import plan_all_reduce
from gradwire.comms.plan.routes import Routes
from gradwire.comms.plan.sharded import ShardedCosts, ShardedWorkload
from gradwire.compressors import registry
from gradwire.compressors.codecs.packed_cast import PACKED_SHARE
from gradwire.compressors.routed import make_routed
from gradwire.compressors.rules import Rule
from gradwire.topology.cluster import Level, Link
from support.simulate import two_level_cluster

LAYOUT = square_layout(4 << 20, side=256)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("nodes", [2, 5])
def test_the_ratio_is_what_the_compressor_says_it_sends(name: str, nodes: int) -> None:
    price = codec_price(name, LAYOUT, nodes, 1e10)
    exact = 2 * (nodes - 1) / nodes * 4 * LAYOUT.numel
    assert price.ratio * exact == pytest.approx(final(name).wire_nbytes(LAYOUT, nodes))


def test_the_ratios_are_those_of_the_formats() -> None:
    ratios = {name: codec_price(name, LAYOUT, 4, 1e10).ratio for name in registry.names()}
    assert ratios["none"] == 1.0
    assert ratios["fp16"] == ratios["bf16"] == 0.5
    assert 0.25 < ratios["int8"] < 0.26
    assert 0.125 < ratios["int4"] < 0.14
    assert 1 / 32 < ratios["onebit"] < 0.04


def test_dgc_sends_to_everybody_so_its_ratio_grows_with_the_nodes() -> None:
    assert codec_price("dgc", LAYOUT, 32, 1e10).ratio > 4 * codec_price("dgc", LAYOUT, 4, 1e10).ratio


def test_powersgd_depends_on_the_shapes() -> None:
    flat, square = layout_of([("bias", (1 << 20,))]), layout_of([("weight", (1024, 1024))])
    assert wire_ratio(final("powersgd"), flat, 4) == pytest.approx(1.0)
    assert wire_ratio(final("powersgd"), square, 4) < 0.02


@pytest.mark.parametrize("name", registry.names())
def test_encoding_is_measured_or_computed_and_costs_nothing_only_where_nothing_is_encoded(name: str) -> None:
    computed, measured = codec_price(name, LAYOUT, 2, 2e10), measured_price(name, LAYOUT, 2, seconds=0.0)
    assert (computed.seconds(4 << 20) > 0) == (measured.seconds(4 << 20) > 0) == (name != "none")
    assert measured.ratio == computed.ratio


@pytest.mark.parametrize("name", [name for name, facts in CODEC_FACTS.items() if facts.computed])
def test_no_first_step_that_is_unlike_the_others_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """advise() times every compressor: these would hold it up for minutes."""
    monkeypatch.setattr(price_module, "_timed", lambda *_: pytest.fail("timed"))
    assert measured_price(name, LAYOUT, 2) == codec_price(name, LAYOUT, 2, CPU_BYTES_PER_SECOND)


@pytest.mark.parametrize("nbytes", [1, 4, 1 << 20, 4 * 1024 * 1024 + 4, 113_200_000])
def test_an_unknown_gradient_has_the_size_that_was_given(nbytes: int) -> None:
    assert 4 * square_layout(nbytes).numel == pytest.approx(nbytes, abs=4)


@pytest.mark.parametrize(("name", "rounds"), [("int8", 2), ("fp16", 2), ("powersgd", 4), ("dgc", 1)])
def test_rounds_are_counted_as_they_are_run(name: str, rounds: int) -> None:
    # Powersgd's two factors are two rings; dgc gathers once.
    price = measured_price(name, LAYOUT, 2, seconds=0.0)
    assert price.rounds == rounds
    assert price.exchanged == (name != "powersgd")


def test_what_the_ranks_agree_on_counts() -> None:
    price = measured_price("int8", LAYOUT, 2, seconds=0.0, agree=lambda own, share: own / share + 100.0)
    assert price.call_seconds > 99  # of both sizes, so none of it is the bytes'


def test_half_of_a_core_takes_twice_as_long() -> None:
    assert alone(0.2, 0.5) == 2 * alone(0.2, 1.0)


def break_even(gbit: float, nbytes: int = 25 << 20) -> float:
    cluster = two_level_cluster([0, 0, 1, 1], Link(20e-6, 5e9), Link(100e-6, gbit * 1e9 / 8))
    price = CodecPrice("bf16_packed", 0.345, rounds=3)
    return packing_break_even(cluster, plan_all_reduce(cluster, nbytes, name="hierarchical", price=price), "gloo")


def test_the_faster_the_links_the_more_packing_must_save() -> None:
    found = [break_even(gbit) for gbit in (0.05, 0.2, 0.5, 2.5, 100)]
    assert found == sorted(found)
    assert found[1] < 0.1
    assert found[2] < 0.31 < found[3]
    assert found[-1] == NEVER
    assert break_even(0.2, 1 << 14) > 0.31  # the messages about lengths take longer than the bytes


@pytest.mark.parametrize("gbit", [0.2, 100.0])
def test_advice_takes_packed_exponents_for_bf16_where_plans_do(gbit: float) -> None:
    """Advice for replicas and for shards, and what a job's own plans say: one judgement of the links."""
    cluster = two_level_cluster([0, 0, 1, 1], Link(20e-6, 5e9), Link(100e-6, gbit * 1e9 / 8))
    prices = [codec_price(name, LAYOUT, 2, 20e9) for name in ("bf16", "bf16_packed", "int8", "int4")]
    advice = advise(cluster, Workload(4 * LAYOUT.numel), prices)
    packed, plain = (advice.offer(f"hierarchical+{name}").plan for name in ("bf16_packed", "bf16"))
    share = packed.bytes_by_level["inter_node"] / plain.bytes_by_level["inter_node"]
    assert share == pytest.approx(PACKED_SHARE if gbit < 1 else 1.0)
    routes = Routes(cluster, 0, "cpu", Config(), make_routed("bf16_packed"))
    own = routes[LAYOUT.numel, torch.float32, LAYOUT].plan.bytes_by_level["inter_node"]
    assert own == pytest.approx(packed.bytes_by_level["inter_node"], rel=0.01)
    costs = ShardedCosts(cluster, ShardedWorkload(numel=LAYOUT.numel, units=1), prices, 20e9)
    assert costs.prices["bf16_packed"].ratio == pytest.approx(share * costs.prices["bf16"].ratio, rel=0.01)
    names = {offer.compressor for offer in advise(cluster, Workload(1 << 20), prices, library="nccl").offers}
    assert "bf16" in names and "bf16_packed" not in names


def test_rules_that_pack_are_counted_as_they_travel() -> None:
    """The bytes of a plan are what its parameters' compressors send: packed on slow links, plain on fast ones."""
    slices = LAYOUT.slices
    rule = Rule(pattern=slices[0].name, compressor="bf16_packed")
    key = (LAYOUT.numel, torch.float32, LAYOUT)
    found = {}
    for gbit in (0.2, 100.0):
        cluster = two_level_cluster([0, 0, 1, 1], Link(20e-6, 5e9), Link(100e-6, gbit * 1e9 / 8))
        for name, compressor in (
            ("bf16", make_routed("bf16")),
            ("rule", make_routed("bf16", rules=[rule])),
            ("always", make_routed("bf16_packed", {"always": True})),
        ):
            plan = Routes(cluster, 0, "cpu", Config(), compressor)[key].plan
            found[name, gbit] = plan.bytes_by_level["inter_node"]
    share = 1 - (1 - PACKED_SHARE) * slices[0].numel / LAYOUT.numel
    assert found["rule", 0.2] == pytest.approx(share * found["bf16", 0.2], rel=1e-3)
    assert found["rule", 100.0] == found["bf16", 100.0]
    for gbit in (0.2, 100.0):
        assert found["always", gbit] == pytest.approx(PACKED_SHARE * found["bf16", gbit], rel=1e-3)


def test_packing_follows_what_is_known_of_the_links() -> None:
    """Asked for and nothing known: packed. What the first steps show decides from then on, with the prediction."""
    presumed = Link(100e-6, 1.25e9, presumed=True)
    cluster = two_level_cluster([0, 0, 1, 1], Link(20e-6, 5e9), presumed)
    compressor = make_routed("bf16_packed")
    routes = Routes(cluster, 0, "cpu", Config(compressor="bf16_packed"), compressor)
    key = (LAYOUT.numel, torch.float32, LAYOUT)

    def state() -> tuple[set[float], float]:
        route = routes[key]
        evens = {part.break_even for chunk in route.chunks for part in chunk.parts if part.layouts}
        return evens, route.plan.bytes_by_level["inter_node"]

    evens, nbytes = state()
    assert evens == {0.0}
    routes.watch(True)  # and while the first steps are watched, plain
    assert state()[1] == pytest.approx(nbytes / PACKED_SHARE, rel=0.01)
    assert "not packed yet" in routes[key].plan.payload_note
    routes.watch(False)
    assert state() == (evens, nbytes)
    for gbit, why in ((100.0, "too fast"), (0.2, "where that saves more than")):
        routes.learned([cluster.levels[0], Level("inter_node", Link(100e-6, gbit * 1e9 / 8))])
        evens, sent = state()
        assert (evens == {NEVER}) == (gbit == 100.0)
        assert sent == pytest.approx(nbytes / (PACKED_SHARE if gbit == 100.0 else 1.0), rel=0.01)
        assert why in routes[key].plan.payload_note
        assert " ".join(routes[key].plan.reasons).count("Exponents") == 1
    fast = Routes(
        two_level_cluster([0, 0, 1, 1], Link(20e-6, 5e9), Link(100e-6, 12.5e9)), 0, "cpu", Config(), compressor
    )
    assert fast[key].plan.bytes_by_level["inter_node"] == pytest.approx(nbytes / 0.69, rel=0.01)
    packed = compressor.main  # type: ignore[attr-defined]
    packed._trials["shard"] = "rests"
    routes.clear()
    assert not packed._trials  # other ranks may have another history
    gpus = Routes(cluster, 0, "cuda", Config(), compressor)
    assert "on CUDA the host would have to wait" in gpus[key].plan.payload_note
