"""Replays: the published parameter counts, the shrinking, the order of the gradients, and the scale."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.compare import replay
from gradwire.bench.compare.replay import (
    DDP_BUCKET_MEGABYTES,
    LEAST_STEP_SECONDS,
    MESSAGE_SHARE,
    MOST_GRADIENT_NBYTES,
    MOST_STEP_SECONDS,
    SHAPES,
    ReplayCase,
    ReplayModel,
    Scale,
    count_buckets,
    fit_scale,
    load_case,
    message_seconds,
    plain_step_seconds,
    shrink,
    spread,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("vgg16", 138_357_544), ("bert_base", 109_482_240), ("swin_t", 28_288_354)],
)
def test_networks_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    shapes = list(SHAPES[name]())
    assert sum(math.prod(shape) for _, shape in shapes) == parameters
    assert len({each for each, _ in shapes}) == len(shapes)
    assert load_case(name).nbytes == 4 * parameters


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("factor", [1, 8, 16, 100])
def test_a_factor_shrinks_the_whole_by_that_much(name: str, factor: int) -> None:
    case = load_case(name)
    smaller = sum(math.prod(shrink(shape, factor)) for _, shape in case.parameters)
    assert smaller * factor * 4 == pytest.approx(case.nbytes, rel=0.03)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=4), st.integers(1, 64))
def test_no_dimension_vanishes_or_grows(shape: list[int], factor: int) -> None:
    for size, smaller in zip(shape, shrink(shape, factor), strict=True):
        assert 1 <= smaller <= size


def test_the_backward_pass_is_spread_over_the_matrices() -> None:
    seconds = spread([(4, 4), (4,), (8, 4), (8,)], 3.0)
    assert seconds == [1.5, 0.0, 1.5, 0.0]


def test_gradients_arrive_last_layer_first_each_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ReplayCase("three", (("a", (8, 8)), ("b", (8, 8)), ("c", (8, 8))), 0.15, "made up")
    model = ReplayModel(case, 2, 2, rank=0)
    events: list[int | float] = []
    monkeypatch.setattr(replay, "sleep", events.append)
    for number, parameter in enumerate(model.weights):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: events.append(number))
    loss = model(torch.zeros((), requires_grad=True))
    assert events == [pytest.approx(0.1)]
    loss.backward()
    wait = pytest.approx(0.2 / 3)
    assert events[1:] == [wait, 2, wait, 1, wait, 0]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.weights)


def test_a_case_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"name": "mine", "source": "measured", "step_seconds": 0.5, "parameters": [["w", [3, 4]]]})
    )
    assert load_case(str(file)) == ReplayCase("mine", (("w", (3, 4)),), 0.5, "measured")
    file.write_text(json.dumps({"name": "mine"}))
    with pytest.raises(ValueError, match="parameters"):
        load_case(str(file))
    with pytest.raises(ValueError, match="resnet50"):
        load_case("resnet51")


NIC = 25_000_000_000


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [16, 32])
@pytest.mark.parametrize("rate", [NIC, 5_000_000_000])
def test_messages_are_a_small_part_of_a_step_that_stays_short(name: str, ranks: int, rate: int) -> None:
    case = load_case(name)
    scale = fit_scale(case, ranks, rate, None, None)
    assert MOST_GRADIENT_NBYTES / 2 < case.nbytes / scale.factor <= MOST_GRADIENT_NBYTES
    step = scale.slow_motion * plain_step_seconds(case, ranks, rate)
    # A whole number of times as slow: a step of half a second comes within a quarter of what is wanted.
    assert 0.75 * LEAST_STEP_SECONDS < step < 1.25 * MOST_STEP_SECONDS
    assert message_seconds(case, ranks) < 1.25 * MESSAGE_SHARE * step or step > 0.75 * MOST_STEP_SECONDS


@pytest.mark.parametrize("name", SHAPES)
def test_buckets_are_those_that_ddp_makes(name: str) -> None:
    case = load_case(name)
    gradients = [torch.empty(shape) for _, shape in reversed(case.parameters)]
    buckets, _ = dist._compute_bucket_assignment_by_size(gradients, [int(DDP_BUCKET_MEGABYTES * 2**20)])  # type: ignore[attr-defined]  # what DDP itself calls
    assert count_buckets(case) == len(buckets)


@pytest.mark.parametrize(
    ("step_seconds", "bits_per_second", "wanted"), [(0.3, 800_000, 0.3), (0.3, 4_000, 0.1 + 0.3), (0.0, 8_000, 0.15)]
)
def test_the_ring_hides_under_the_backward_pass_alone(step_seconds: float, bits_per_second: int, wanted: float) -> None:
    case = ReplayCase("one", (("a", (25,)),), step_seconds, "made up")  # 100 bytes, 1.5 of each on the ring of four
    assert plain_step_seconds(case, 4, bits_per_second) == pytest.approx(wanted)


@pytest.mark.parametrize(("factor", "slow_motion"), [(1, 1), (16, 1), (1, 9), (64, 12)])
def test_waits_and_transfers_keep_their_ratio(factor: int, slow_motion: int) -> None:
    case = load_case("resnet50")
    scale = fit_scale(case, 32, NIC, factor, slow_motion)
    assert scale == Scale(factor, slow_motion)
    really = case.nbytes * 8 / NIC / case.step_seconds
    replayed = case.nbytes / factor * 8 / scale.link(NIC) / (case.step_seconds * slow_motion)
    assert replayed == pytest.approx(really, rel=1e-4)


def test_there_are_as_many_buckets_as_the_network_has() -> None:
    case = load_case("vgg16")
    assert case.nbytes / 64 / Scale(64, 3).bucket_megabytes == pytest.approx(case.nbytes / 25)
