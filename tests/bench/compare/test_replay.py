"""Replays: the published parameter counts, the shrinking, the order and the time of the gradients."""

import itertools
import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.compare.replay import ReplayCase, ReplayModel, load_case, shrink, spread
from gradwire.bench.compare.replay_shapes import SHAPES


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


def test_gradients_arrive_last_layer_first_and_in_time() -> None:
    case = ReplayCase("three", (("a", (8, 8)), ("b", (8, 8)), ("c", (8, 8))), 0.15, "made up")
    model = ReplayModel(case, 2, 2, rank=0)
    order: list[tuple[int, float]] = []
    for number, parameter in enumerate(model.weights):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: order.append((number, time.perf_counter()))
        )
    began = time.perf_counter()
    loss = model(torch.zeros((), requires_grad=True))
    assert time.perf_counter() - began >= model.forward_seconds
    loss.backward()
    assert [number for number, _ in order] == [2, 1, 0]
    assert all(
        later - sooner >= 0.9 * model.backward_seconds[0] for (_, sooner), (_, later) in itertools.pairwise(order)
    )
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
