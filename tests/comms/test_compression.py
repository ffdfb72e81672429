"""Compressed steps through the whole stack, ranks as threads: laws of state, overflow, flush, resume, new layouts."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.checkpoint import Checkpoint, pack, unpack
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.config import Config
from gradwire.comms.loss_scale import UNKNOWN_SCALE
from gradwire.comms.report import Report
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.compressors.base import Layout, StateDict
from support.layouts import layout_of_whole
from support.threads import run_ranks

Result = TypeVar("Result")
SHAPES = {"first.weight": (40, 96), "first.bias": (96,), "second.weight": (64, 64), "third.weight": (30, 50)}
OPTIONS: dict[str, dict[str, bool | int | float | str]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "onebit": {"warmup_steps": 0, "momentum": 0.0},
    "dgc": {"density": 0.05, "momentum": 0.0, "warmup_steps": 0},
    "powersgd": {"rank": 2, "warmup_steps": 0},
}
CPU = torch.device("cpu")


def layout_of(names: Sequence[str]) -> Layout:
    return layout_of_whole(SHAPES, names)


ONE_BUCKET = [tuple(SHAPES)]
TWO_BUCKETS = [("third.weight", "second.weight"), ("first.bias", "first.weight")]


class Rank:
    """One rank's communicator and compression, fed with buckets by hand."""

    def __init__(
        self, store: HashStore, rank: int, nodes: str, name: str, job: str = "job", plan: str = "auto"
    ) -> None:
        self.compression = Compression(name, OPTIONS[name], (), rank, len(nodes))
        config = Config(
            hostname=nodes[rank],
            plan={"name": plan, "chunks": 1},
            compressor=name,
            compressor_options=OPTIONS[name],
            timeout=timedelta(seconds=30),
        )
        self.communicator = Communicator(
            store, rank, len(nodes), CPU, config, name=job, compressor=self.compression.compressor
        )
        self.rank = rank

    def step(self, number: int, buckets: Sequence[Sequence[str]], scale: float = 1.0, poison: bool = False) -> Tensor:
        """Averages one step's gradients; returns them parameter by parameter in the order of SHAPES."""
        gradients = {name: gradient(self.rank, number, name) * scale for name in SHAPES}
        if poison and self.rank == 0:
            gradients["second.weight"][5] = float("inf")
        self.compression.loss_scale.follow()
        results = {}
        waiting: list[Bucket] = []
        for names in buckets:
            layout = layout_of(names)
            flat = torch.cat([gradients[name] for name in names])
            bucket = Bucket.of(flat, layout)
            self.communicator.start(
                AllReduce((flat,), layout, (bucket,)), scale=1 / self.communicator.size, flush=self.compression.flushing
            )
            waiting.append(bucket)
            results[tuple(names)] = flat
        self.compression.end_step(waiting, [layout_of(names) for names in buckets])
        parts = {
            piece.name: flat[piece.start : piece.stop]
            for names, flat in results.items()
            for piece in layout_of(names).slices
        }
        return torch.cat([parts[name] for name in SHAPES])


def gradient(rank: int, step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name) + ord(name[0]))
    return torch.randn(torch.Size(SHAPES[name]).numel(), generator=generator)


def mean_gradient(size: int, step: int) -> Tensor:
    return torch.stack([torch.cat([gradient(rank, step, name) for name in SHAPES]) for rank in range(size)]).mean(0)


def on_ranks(nodes: str, name: str, body: Callable[[Rank], Result], plan: str = "auto") -> list[Result]:
    store = HashStore()

    def run(rank: int) -> Result:
        end = Rank(store, rank, nodes, name, plan=plan)
        try:
            return body(end)
        finally:
            end.communicator.close()

    return run_ranks(len(nodes), run)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("nodes", "plan"),
    [
        *((nodes, "auto") for nodes in ("aabb", "abab", "aaab")),
        *((nodes, "flat") for nodes in ("aaab", "aaa")),
        ("aabb", "leader"),
    ],
)
def test_what_flush_returns_completes_the_sum(nodes: str, plan: str, name: str) -> None:
    steps = 6

    def body(end: Rank) -> Tensor:
        total = sum(end.step(number, ONE_BUCKET) for number in range(steps))
        end.compression.flushing = True
        return total + end.step(steps, ONE_BUCKET)

    results = on_ranks(nodes, name, body, plan)
    assert all(torch.equal(results[0], other) for other in results)
    expected = sum(mean_gradient(len(nodes), number) for number in range(steps + 1))
    lossy_without_state = {"fp16": 0.02, "bf16": 0.1}.get(name, 0.0)  # no residual: one rounding a step
    torch.testing.assert_close(results[0], torch.as_tensor(expected), rtol=1e-4, atol=2e-4 + lossy_without_state)


@pytest.mark.parametrize("plan", ["auto", "flat", "leader"])
@pytest.mark.parametrize("name", ["onebit", "dgc", "powersgd", "int4"])
def test_state_moves_with_the_parameters_when_buckets_are_rebuilt(name: str, plan: str) -> None:
    def body(end: Rank) -> Tensor:
        total = end.step(0, ONE_BUCKET) + end.step(1, ONE_BUCKET) + end.step(2, TWO_BUCKETS)
        end.compression.flushing = True
        return total + end.step(3, ONE_BUCKET)

    results = on_ranks("aabb", name, body, plan)
    assert all(torch.equal(results[0], other) for other in results)
    expected = sum(mean_gradient(4, number) for number in range(4))
    torch.testing.assert_close(results[0], torch.as_tensor(expected), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_non_finite_step_leaves_no_trace(name: str) -> None:
    def body(poison: bool) -> Callable[[Rank], tuple[Tensor, bool]]:
        def run(end: Rank) -> tuple[Tensor, bool]:
            end.step(0, ONE_BUCKET)
            bad = end.step(1, ONE_BUCKET, poison=True) if poison else torch.tensor([float("nan")])
            return end.step(2, ONE_BUCKET), bool(torch.isfinite(bad).all())

        return run

    clean = on_ranks("aabb", name, body(False))
    poisoned = on_ranks("aabb", name, body(True))
    assert not any(finite for _, finite in poisoned)
    assert all(torch.equal(clean[0][0], result) for result, _ in poisoned)


@pytest.mark.parametrize("name", ["onebit", "dgc", "powersgd", "int4"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    def whole(end: Rank) -> tuple[Tensor, StateDict]:
        end.step(0, ONE_BUCKET)
        end.step(1, ONE_BUCKET)
        saved = end.compression.state_dict()
        return torch.stack([end.step(number, ONE_BUCKET) for number in (2, 3)]), saved

    through = on_ranks("aabb", name, whole)

    def resumed(end: Rank) -> Tensor:
        end.compression.load_state_dict(through[end.rank][1])
        end.communicator.state_loaded()
        return torch.stack([end.step(number, ONE_BUCKET) for number in (2, 3)])

    for (expected, _), result in zip(through, on_ranks("aabb", name, resumed), strict=True):
        assert torch.equal(expected, result)


class Scaler:
    """A GradScaler that is asked for nothing but its scale."""

    def get_scale(self) -> float:
        return 1024.0


SCALES: dict[str, tuple[str, str, Callable[[Compression], object], int]] = {
    "nothing is said": ("int8", "ab", lambda compression: None, 1),
    "a scaler is watched": ("int8", "ab", lambda compression: compression.loss_scale.watch(Scaler()), 0),
    "the script names its scale": ("int8", "ab", lambda compression: compression.loss_scale.set(8.0), 0),
    "nothing is held back": ("fp16", "ab", lambda compression: None, 0),
    "nothing is compressed on one node": ("int8", "aa", lambda compression: None, 0),
}
"""Case -> compressor, nodes, what the script says of its loss scale, and warnings of each rank."""


@pytest.mark.parametrize("case", SCALES)
def test_an_infinite_average_of_an_unknown_scale_is_warned_of_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    name, nodes, say, wanted = SCALES[case]

    def body(end: Rank) -> int:
        end.compression.placement = end.communicator.placement
        say(end.compression)
        for number in range(3):
            end.step(number, ONE_BUCKET, poison=number > 0)
        return 0

    on_ranks(nodes, name, body)
    assert sum(UNKNOWN_SCALE in each.message for each in caplog.records) == wanted * len(nodes)


def test_a_step_that_the_device_has_dropped_is_warned_of_too(caplog: pytest.LogCaptureFixture) -> None:
    compression = Compression("int8", {}, (), 0, 2)
    for finite in (True, False):
        compression._undecided = (SimpleNamespace(read=lambda finite=finite: finite), False)  # type: ignore[assignment]
        compression.resolve_last_step()
        assert [UNKNOWN_SCALE in each.message for each in caplog.records] == [True] * (not finite)


def test_a_changed_loss_scale_rescales_what_was_held_back() -> None:
    def body(end: Rank) -> Tensor:
        end.compression.loss_scale.set(1024.0)
        total = end.step(0, ONE_BUCKET, scale=1024.0) / 1024.0
        end.compression.loss_scale.set(512.0)
        end.compression.flushing = True
        return total + end.step(1, ONE_BUCKET, scale=512.0) / 512.0

    expected = mean_gradient(4, 0) + mean_gradient(4, 1)
    torch.testing.assert_close(on_ranks("aabb", "onebit", body)[0], expected, rtol=1e-4, atol=1e-4)


def test_another_world_size_takes_only_a_flushed_state() -> None:
    def saved(flush: bool) -> Callable[[Rank], Checkpoint]:
        def run(end: Rank) -> Checkpoint:
            end.step(0, ONE_BUCKET)
            end.compression.flushing = flush
            end.step(1, ONE_BUCKET)
            return pack(end.compression.state_dict(), end.rank, 4, end.compression.dirty)

        return run

    clean, dirty = on_ranks("aabb", "onebit", saved(True)), on_ranks("aabb", "onebit", saved(False))
    for rank in range(2):
        assert unpack(clean[rank], rank, 2) is None
        with pytest.raises(ValueError, match=r"of 4 ranks, there are 2.* call state\.flush\(\)"):
            unpack(dirty[rank], rank, 2)


def test_loaded_transfers_stay_until_a_step_replaces_them() -> None:
    def body(end: Rank) -> tuple[Tensor, Tensor, Tensor]:
        end.step(0, ONE_BUCKET)
        saved = end.compression.state_dict()
        end.step(1, TWO_BUCKETS)
        end.compression.load_state_dict(saved)
        end.communicator.state_loaded()
        again = end.compression.state_dict()
        end.compression.take_saved_all_reduces()  # as the hook does when it begins a step
        end.step(1, TWO_BUCKETS)
        states = (saved, again, end.compression.state_dict())
        return tuple(torch.as_tensor(state["gradwire/transfers"]) for state in states)  # type: ignore[return-value]

    for saved, again, after in on_ranks("aabb", "int4", body):
        assert torch.equal(saved, again) and not torch.equal(saved, after)


@pytest.mark.parametrize(("nodes", "plan", "place"), [("aaa", "flat", "all ranks"), ("aabb", "flat", "all ranks")])
def test_the_flat_plan_compresses_between_all_ranks(nodes: str, plan: str, place: str) -> None:
    """One GPU a node, or one box whose inside is the slow link: nothing overrides the plan that was asked for."""

    def body(end: Rank) -> tuple[str, float, float]:
        end.step(0, ONE_BUCKET)
        report = end.communicator.report()
        (row,) = report.rows
        assert row.level == place
        return "\n".join(report.plans), row.logical_nbytes, row.wire_nbytes

    for text, logical, sent in on_ranks(nodes, "int8", body, plan):
        assert "flat: all_reduce over all ranks (int8" in text
        assert "int8 was asked for, and the flat plan by name" in text
        assert sent < 0.3 * 2 * (len(nodes) - 1) / len(nodes) * logical


def test_the_leader_plan_compresses_between_the_leaders() -> None:
    def body(end: Rank) -> tuple[str, list[tuple[str, float]]]:
        end.step(0, ONE_BUCKET)
        report = end.communicator.report()
        return "\n".join(report.plans), [(row.level, row.wire_nbytes) for row in report.rows]

    for rank, (text, rows) in enumerate(on_ranks("aabb", "int8", body, "leader")):
        assert "leader: reduce intra_node -> all_reduce inter_node (int8, asynchronous) -> broadcast intra_node" in text
        assert bool(rows[1][1]) == (rank in (0, 2)), rows


def test_one_node_has_nothing_to_compress_and_says_so() -> None:
    def body(end: Rank) -> tuple[Tensor, Report]:
        return end.step(0, ONE_BUCKET), end.communicator.report()

    for result, report in on_ranks("aaa", "onebit", body):
        torch.testing.assert_close(result, mean_gradient(3, 0), rtol=1e-5, atol=1e-6)
        said = "onebit is not used: nothing crosses between nodes."
        assert f"why: {said}" in str(report).splitlines() and said in " ".join(report.full().split())


@pytest.mark.parametrize("name", ["int8", "onebit", "dgc", "powersgd"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused_in_words(name: str, odd: float) -> None:
    store = HashStore()

    def run(rank: int) -> StateDict:
        one = Rank(store, rank, "ab", name)
        for number in range(2):
            one.step(number, ONE_BUCKET)
        found = one.compression.state_dict()
        one.communicator.close()
        return found

    saved = run_ranks(2, run)[0]
    other = Compression(name, OPTIONS[name], (), 0, 2)
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            poisoned = value.clone()
            poisoned.view(-1)[-1] = odd
            with pytest.raises(ValueError, match="`state` holds a NaN or an infinity in"):
                other.load_state_dict({**saved, key: poisoned})
    with pytest.raises(ValueError, match=f"`state` has a loss scale of {odd}"):
        other.load_state_dict({**saved, "gradwire/loss_scale": odd})
    other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("name", "key", "odd"),
    [
        ("int8", "gradwire/loss_scale", None),
        ("int8", "gradwire/transfers", "x"),
        ("int8", "gradwire/transfers", torch.zeros(3)),
        ("int8", "0|step", None),
    ],
)
def test_what_no_state_has_is_refused_in_words_and_changes_nothing(name: str, key: str, odd: Any) -> None:
    one = Compression(name, {}, (), 0, 2)
    before = one.state_dict()
    other = {each: 7 if each.endswith("step") else value for each, value in before.items()}
    with pytest.raises(ValueError, match=r"`state.*(damaged|wanted|corrupt)"):
        one.load_state_dict({**other, key: odd})
    assert str(one.state_dict()) == str(before)
    one.load_state_dict(other)
    assert str(one.state_dict()) == str(other)
