"""The verdict: which plan, and whether to compress at all."""

import pickle
import re
from pathlib import Path

import pytest
from torch import Tensor

from gradwire.comms.plan import cost
from gradwire.comms.plan.advise import (
    ANY_OPTIMIZER,
    LEAST_DISTORTION_FIRST,
    SAY_OPTIMIZER,
    WAIT_SHARE,
    Advice,
    Workload,
    advise,
    buckets_of,
    step_seconds,
    warning_of,
)
from gradwire.comms.plan.algorithms import Messages, flat_messages
from gradwire.comms.plan.codec_price import CODEC_FACTS, OPTIMIZER_NAMES, codec_price, square_layout
from gradwire.comms.plan.planner import candidate_plans
from gradwire.comms.plan.traffic import Shape
from gradwire.compressors import registry
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster
from support.convergence_page import ended_behind, trained

NVSWITCH = Link(4e-6, 235e9)
GRADIENT = 113_200_000


def cluster_of(nodes: int, gbit: float, nics: int = 1) -> Cluster:
    nic = Link(30e-6, gbit * 1e9 / 8, nics, 2 * nics)
    return uniform_cluster((8, nodes), (Level(LEVEL_NAMES[0], NVSWITCH), Level(LEVEL_NAMES[1], nic)))


def ask(cluster: Cluster, backward_ms: float = 0.0, optimizer: str = "sgd", library: str = "nccl") -> Advice:
    prices = [codec_price(name, square_layout(GRADIENT), len(cluster.nodes), 1.4e12) for name in registry.names()]
    return advise(cluster, Workload(GRADIENT, backward_ms / 1e3, optimizer=optimizer), prices, library=library)


def test_accumulated_micro_batches_send_once_and_make_compression_worth_less() -> None:
    cluster, micro = cluster_of(4, 25), 0.045
    prices = [codec_price(name, square_layout(GRADIENT), 4, 1.4e12) for name in registry.names()]

    def advice(accumulate: int) -> Advice:
        return advise(cluster, Workload(GRADIENT, micro, accumulate=accumulate), prices, library="nccl")

    once, eight = advice(1), advice(8)
    for candidate, other in zip(once.candidates, eight.candidates, strict=True):
        assert other.step_seconds == pytest.approx(candidate.step_seconds + 7 * micro)
        assert (other.seconds, other.exposed_seconds) == (candidate.seconds, candidate.exposed_seconds)
    assert once.recommend.compressor != "none"
    assert advice(64).recommend.compressor == "none"  # what travels once in 64 backward passes is under 5 %
    with pytest.raises(ValueError, match="`accumulate` is 0"):
        Workload(GRADIENT, accumulate=0)


def test_a_step_is_never_shorter_than_backward_or_than_the_wire() -> None:
    for backward_ms in (0, 10, 45, 200):
        for candidate in ask(cluster_of(4, 25), backward_ms).candidates:
            assert candidate.step_seconds >= backward_ms / 1e3
            assert candidate.step_seconds >= candidate.plan.bytes_by_level["inter_node"] / (25e9 / 8) - 1e-9
            assert candidate.exposed_seconds == pytest.approx(candidate.step_seconds - backward_ms / 1e3)


def test_more_backward_never_exposes_more() -> None:
    exposed = [
        ask(cluster_of(4, 25), backward_ms).candidate("flat").exposed_seconds for backward_ms in (0, 20, 45, 90, 400)
    ]
    assert exposed == sorted(exposed, reverse=True)


@pytest.mark.parametrize(("nodes", "gbit", "nics", "backward_ms"), [(1, 25, 1, 45), (4, 3200, 8, 45), (4, 25, 1, 500)])
def test_do_not_compress(nodes: int, gbit: float, nics: int, backward_ms: float) -> None:
    # One node; a NIC for each GPU; a backward pass that hides everything.
    advice = ask(cluster_of(nodes, gbit, nics), backward_ms)
    assert advice.recommend.compressor == "none"
    assert "Do not compress" in advice.recommend.why


def test_compress_where_the_wire_is_slow_and_say_that_it_is_lossy() -> None:
    advice = ask(cluster_of(4, 25), 45)
    chosen = advice.candidate(f"{advice.recommend.plan}+{advice.recommend.compressor}")
    assert chosen.available
    assert chosen.step_seconds < 0.95 * advice.candidate("hierarchical").step_seconds
    assert "lossy" in advice.recommend.why and "network card" in advice.recommend.why


def test_of_the_fast_enough_the_mildest_is_recommended() -> None:
    advice = ask(cluster_of(4, 25), 45)
    able = [candidate for candidate in advice.candidates if candidate.available and not candidate.warning]
    fastest = min(candidate.step_seconds for candidate in able)
    close = [candidate.compressor for candidate in able if candidate.step_seconds <= 1.05 * fastest]
    known = [
        name for name in close if name in LEAST_DISTORTION_FIRST
    ]  # a codec that another test has registered comes last
    assert advice.recommend.compressor == min(known, key=LEAST_DISTORTION_FIRST.index)


CHOICES = Path(__file__).parents[3] / "docs/how-to/choose_a_compressor.md"
"""The page that says which compressor to take with which optimizer."""


def chosen_on_page(optimizer: str) -> set[str]:
    """Compressors that the page's table has for an optimizer without a condition on the run or the result."""
    row = next(line for line in CHOICES.read_text().splitlines() if line.startswith(f"| {optimizer}"))
    _, _, first, then, *_ = row.split("|")
    offered = [part for part in f"{first};{then}".split(";") if "long runs" not in part and "do not matter" not in part]
    return {name for part in offered for name in re.findall(r"`(\w+)`", part)}


@pytest.mark.parametrize(("optimizer", "row"), [("sgd", "SGD"), ("adamw", "Adam"), ("muon", "Muon")])
def test_what_is_recommended_is_what_the_page_chooses(optimizer: str, row: str) -> None:
    assert "int8" in chosen_on_page(row) and "dgc" not in chosen_on_page(row)
    found = set()
    for nodes, gbit in ((2, 0.04), (3, 0.2), (2, 1), (4, 10), (16, 25)):
        for backward_ms in (0, 5, 500):
            for library in ("gloo", "nccl"):
                found.add(ask(cluster_of(nodes, gbit), backward_ms, optimizer, library).recommend.compressor)
    assert found <= chosen_on_page(row) | {"none", "bf16"} and len(found) > 2, found


def test_a_compressor_that_requires_sgd_is_not_recommended_to_adam() -> None:
    advice = ask(cluster_of(16, 1), 1, optimizer="adam")
    assert advice.recommend.compressor not in ("dgc", "onebit")
    assert "requires SGD" in advice.candidate("hierarchical+dgc").warning
    assert not advice.candidate("hierarchical+int8").warning


def test_two_nodes_and_nccl_stay_flat() -> None:
    advice = ask(cluster_of(2, 25), 500)
    assert advice.recommend.plan == "flat"
    assert "NCCL's tree" in advice.recommend.why
    assert (
        ask(cluster_of(2, 25), 500, library="gloo").candidate("flat").seconds > 1.5 * advice.candidate("flat").seconds
    )


def test_every_plan_is_offered_with_every_compressor() -> None:
    names = {candidate.name for candidate in ask(cluster_of(4, 25)).candidates}
    for plan in ("flat", "hierarchical", "leader"):
        assert {plan} | {f"{plan}+{name}" for name in registry.names() if name != "none"} <= names
    assert {"tree", "halving_doubling", "tree+fp16"} <= names


def test_buckets_add_up() -> None:
    assert sum(buckets_of(Workload(GRADIENT))) == GRADIENT
    assert buckets_of(Workload(50, bucket_nbytes=20)) == [20, 20, 10]
    assert buckets_of(Workload(0)) == []
    assert buckets_of(Workload(50, bucket_nbytes=20, bucket_sizes=(30, 20))) == [30, 20]


def test_a_compressed_bucket_waits_for_one_in_flight_and_an_exact_one_does_not() -> None:
    """On CPUs alone: NCCL's calls come in one order on all ranks."""
    levels = (Level(LEVEL_NAMES[0], Link(1e-5, 5e9)), Level(LEVEL_NAMES[1], Link(1e-4, 4.7e6)))
    price = codec_price("int8", square_layout(GRADIENT), 2, 20e9)
    times = {}
    for library in ("gloo", "nccl"):
        advice = advise(uniform_cluster((1, 2), levels), Workload(6_240_000, 0.1, 2 << 20), [price], library=library)
        for name, compressor in (("hierarchical", "none"), ("hierarchical+int8", "int8")):
            times[library, compressor] = advice.candidate(name).step_seconds
    assert times["gloo", "none"] == times["nccl", "none"]
    assert 1.08 < times["gloo", "int8"] / times["nccl", "int8"] < 1 + WAIT_SHARE


def test_buckets_wait_for_their_gradients_and_for_the_wire() -> None:
    plan = next(candidate_plans(cluster_of(4, 25), 10_000_000, "flat"))
    assert step_seconds([plan, plan], [0.0, 1.0]) == pytest.approx(1.0 + plan.seconds)
    assert step_seconds([plan] * 5, [0.0] * 5) == pytest.approx(5 * plan.seconds)


def test_nothing_is_recommended_that_the_convergence_page_calls_behind() -> None:
    behind = ended_behind()
    assert behind == {("powersgd", "adamw"), ("waterfill2", "adamw")}
    for compressor, optimizer in behind:
        assert "higher loss" in warning_of(compressor, optimizer) and warning_of(compressor, ANY_OPTIMIZER)
    for nodes, gbit, backward_ms in ((2, 0.01, 50.0), (2, 1, 0.0), (4, 0.1, 5.0), (8, 1, 300.0), (4, 10, 20.0)):
        for optimizer in ("sgd", "adamw", ANY_OPTIMIZER):
            for library in ("nccl", "gloo"):
                advice = ask(cluster_of(nodes, gbit), backward_ms, optimizer, library)
                refused = {name for name, kind in behind if optimizer in (kind, ANY_OPTIMIZER)}
                warnings = {candidate.compressor for candidate in advice.candidates if candidate.warning}
                assert advice.recommend.compressor not in refused | warnings
                assert refused <= warnings


def test_an_optimizer_that_nobody_has_said_gets_what_fits_all() -> None:
    for name in ("onebit", "dgc", "powersgd", "waterfill2"):
        assert warning_of(name, ANY_OPTIMIZER).endswith("say which optimizer is yours")
    assert warning_of("waterfill3", ANY_OPTIMIZER).endswith("with waterfill3 was measured under SGD" + SAY_OPTIMIZER)
    for name in ("fp16", "bf16", "int8", "int4", "waterfill4"):
        assert warning_of(name, ANY_OPTIMIZER) == ""


def test_the_table_of_what_was_trained_is_that_of_the_pages() -> None:
    assert set(CODEC_FACTS) == set(registry.BUILT_IN) == set(LEAST_DISTORTION_FIRST)
    on_pages = trained() & {(name, optimizer) for name in registry.BUILT_IN for optimizer in OPTIMIZER_NAMES}
    exact = {("none", optimizer) for optimizer in OPTIMIZER_NAMES}
    table = {(name, optimizer) for name, facts in CODEC_FACTS.items() for optimizer in facts.trained}
    assert table == on_pages | exact


class NothingCodec:
    """Faster than all that were trained with, because it sends next to nothing."""

    def wire_nbytes(self, numel: int) -> int:
        return 1 + numel // 64

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        payload.zero_()

    def decode(self, payload: Tensor, flat: Tensor) -> None:
        flat.zero_()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "other", ANY_OPTIMIZER])
def test_nothing_is_recommended_that_nobody_has_trained_with(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register_codec("a users own", NothingCodec)
    alike = ("sgd", "adamw") if optimizer in ("other", ANY_OPTIMIZER) else (optimizer,)
    for nodes, gbit in ((2, 0.01), (2, 1), (4, 0.1)):
        for library in ("nccl", "gloo"):
            advice = ask(cluster_of(nodes, gbit), 50.0, optimizer, library)
            own = advice.candidate("hierarchical+a users own")
            assert own.step_seconds < advice.candidate("hierarchical+int4").step_seconds
            assert "no training with a users own was measured" in own.warning
            assert set(alike) <= set(CODEC_FACTS[advice.recommend.compressor].trained)


def test_messages_of_all_ranks_are_counted_once_for_each_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them is what takes longest with 16,384 ranks, and every compressor is priced against the same ones."""
    counted: list[str] = []

    def count(shape: Shape, algorithm: str) -> Messages:
        counted.append(algorithm)
        return flat_messages(shape, algorithm)

    monkeypatch.setattr(cost, "flat_messages", count)
    ask(cluster_of(5, 25.5), 45)  # a cluster that no other test has
    assert sorted(counted) == sorted(set(counted)) != []


def test_a_cluster_is_the_same_key_after_pickling() -> None:
    cluster = cluster_of(4, 25)
    assert cluster.nodes is cluster.nodes and cluster.wide_levels == (0, 1) and len({cluster}) == 1
    copied = pickle.loads(pickle.dumps(cluster))
    assert copied == cluster and hash(copied) == hash(cluster) and copied.nodes == cluster.nodes
