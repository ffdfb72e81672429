"""Prices come from the compressors themselves, not from a table beside them."""

from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.comms.plan.codec_price import (
    CODEC_FACTS,
    alone,
    codec_price,
    codec_seconds,
    final,
    layout_of,
    measured_price,
    square_layout,
    wire_ratio,
)
from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors import registry
from gradwire.compressors.kernels import dispatch, reference
from gradwire.compressors.optim.peers import run_requests

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


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that torch's operators read and write: their inputs and outputs, but for views."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and func is not torch.ops.aten.empty.memory_format:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


@pytest.mark.parametrize("name", [name for name in CODEC_FACTS if name != "none"])
def test_without_kernels_the_price_is_that_of_torchs_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.KERNELS_ON, "cpu", cast(dispatch.Kernels, reference))
    layout, compressor, group = square_layout(1 << 19, side=256), final(name), EchoGroup(2)
    for step in range(2):
        gradient = torch.randn(layout.numel)
        with Traffic() as traffic:  # type: ignore[no-untyped-call]
            run_requests(compressor.all_reduce(gradient, layout, group.member), group)
            compressor.end_step(True)
        assert step < 1 or traffic.nbytes / layout.numel == pytest.approx(CODEC_FACTS[name].operators_nbytes, rel=0.05)
    slow, fast = (codec_seconds(name, 1e9, kernels=kernels) for kernels in (False, True))
    assert slow > 4 * fast


def test_the_warning_about_missing_kernels_has_the_cost_that_is_counted() -> None:
    times = sorted(each.operators_nbytes / each.touched_nbytes for name, each in CODEC_FACTS.items() if name != "none")
    least, most = map(int, dispatch.OPERATORS_COST.split(" to "))
    assert least == int(times[0]) and most - 10 < times[-1] <= most


@pytest.mark.parametrize("nbytes", [1, 4, 1 << 20, 4 * 1024 * 1024 + 4, 113_200_000])
def test_an_unknown_gradient_has_the_size_that_was_given(nbytes: int) -> None:
    assert 4 * square_layout(nbytes).numel == pytest.approx(nbytes, abs=4)


@pytest.mark.parametrize("nbytes", [1e10, 1e12, 1e14])
def test_a_layout_of_any_size_has_few_matrices(nbytes: float) -> None:
    layout = square_layout(nbytes)
    assert 4 * layout.numel == pytest.approx(nbytes, abs=4) and len(layout.slices) < 5000
    assert len(square_layout(1e10).slices) == 2385  # 1024 x 1024 as long as those are few


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
