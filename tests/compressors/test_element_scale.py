"""Laws: scales follow what the dense start showed, are never zero, and stay with their elements."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.codecs.onebit import OneBit
from gradwire.compressors.element_scale import FLOOR, ElementScale, fixed_order_sum
from gradwire.compressors.optim.peers import run_requests
from support.threads import ThreadGroup, take_turns

CPU = torch.device("cpu")
NUMEL, WARMUP = 4000, 20
SIZES = torch.exp(torch.randn(NUMEL, generator=torch.Generator().manual_seed(7)) * 2.0)
"""Elements between a thousandth and a thousand times as large as each other."""


def layout_of(*runs: tuple[str, int, int]) -> Layout:
    slices, at = [], 0
    for name, start, numel in runs:
        slices.append(Slice(name, (1000,), start, at, numel))
        at += numel
    return Layout(tuple(slices))


def frozen(layout: Layout, totals: Sequence[Tensor]) -> ElementScale:
    scale = ElementScale()
    for total in totals:
        scale.observe(layout, total)
        scale.commit()
    scale.freeze()
    return scale


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def test_scales_follow_the_mean_magnitude() -> None:
    layout = layout_of(("a", 0, 100), ("b", 0, 300))
    totals = [torch.randn(400, generator=torch.Generator().manual_seed(step)) * SIZES[:400] for step in range(50)]
    scales = frozen(layout, totals).scales(layout, CPU)
    means = torch.stack(totals).abs().mean(0)
    for run in (slice(0, 100), slice(100, 400)):
        ratio = scales[run] / (means[run] + FLOOR * means[run].mean())
        assert float(ratio.max() / ratio.min()) < 4.0  # the floor enters as a power of two, and the scale is one
        order = means[run].argsort()
        assert torch.equal(scales[run][order], scales[run].sort().values)


@pytest.mark.parametrize("factor", [2.0**-60, 0.5, 2.0**40])
def test_a_common_factor_changes_no_bit(factor: float) -> None:
    layout, total = layout_of(("a", 0, 100), ("b", 0, 300)), torch.randn(400) * SIZES[:400]
    ours, wanted = (frozen(layout, [each]).scales(layout, CPU) for each in (total * factor, total))
    assert torch.equal(bits(ours), bits(wanted))


@pytest.mark.parametrize("factor", [0.0, 1e-44, 1.0, 1e37])
def test_scales_are_never_zero_and_always_finite(factor: float) -> None:
    layout = layout_of(("a", 0, 100), ("dead", 0, 50), ("b", 0, 250))
    total = torch.randn(400, generator=torch.Generator().manual_seed(1)) * factor
    total[100:150] = 0.0
    total[200] = 0.0
    scales = frozen(layout, [total]).scales(layout, CPU)
    assert bool((scales > 0.0).all()) and bool(scales.isfinite().all())
    assert torch.equal(scales[100:150], torch.ones(50))


def test_what_is_divided_by_a_scale_comes_back() -> None:
    """So that a residual, which is kept in scales, returns to the gradient as it is."""
    layout = layout_of(("a", 0, 1000), ("b", 0, 1000))
    scales = frozen(layout, [torch.randn(2000, generator=torch.Generator().manual_seed(3)) * SIZES[:2000]]).scales(
        layout, CPU
    )
    gradient = torch.randn(2000, generator=torch.Generator().manual_seed(4))
    assert float(scales.max() / scales.min()) > 5
    assert torch.equal(bits(gradient / scales * scales), bits(gradient))


def test_scales_stay_with_their_elements() -> None:
    """In a new layout everything is found again, and what the dense start did not show counts as 1, for good."""
    old, new = layout_of(("a", 0, 100), ("b", 0, 300)), layout_of(("b", 200, 100), ("late", 0, 50), ("a", 0, 100))
    scale = frozen(old, [torch.randn(400, generator=torch.Generator().manual_seed(2))])
    before = scale.scales(old, CPU).clone()
    wanted = torch.cat([before[300:], torch.ones(50), before[:100]])
    assert torch.equal(scale.scales(new, CPU), wanted)
    held = {(piece.name, piece.start): piece.value for piece in scale.pieces()}
    assert torch.equal(held["late", 0], torch.ones(50))
    scale.adopt(new, torch.zeros(250))
    assert torch.equal(scale.scales(new, CPU), wanted)


def test_another_loss_scale_changes_no_scale() -> None:
    layout = layout_of(("a", 0, 100))
    scale = frozen(layout, [torch.randn(100)])
    before = scale.scales(layout, CPU).clone()
    scale.rescale(0.5)
    assert torch.equal(scale.scales(layout, CPU), before)


def first_compressed(warmup_steps: int) -> Tensor:
    """What two ranks receive in the first step after the dense ones."""
    layout = Layout((Slice("a", (NUMEL,), 0, 0, NUMEL),))
    groups = ThreadGroup.create(2)

    def body(rank: int) -> Tensor:
        compressor = OneBit(momentum=0.0, warmup_steps=warmup_steps)
        for step in range(warmup_steps + 1):
            shard = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2 * step + rank)) * SIZES
            run_requests(compressor.all_reduce(shard, layout, groups[rank].member), groups[rank])
            compressor.end_step(True)
        return shard

    ours, theirs = take_turns(2, body)
    assert torch.equal(bits(ours), bits(theirs))
    return ours


def test_small_elements_are_not_drowned_by_their_block() -> None:
    """With scales every element arrives at about its own size, where one magnitude for all drowns the small ones."""
    median = {steps: float((first_compressed(steps).abs() / SIZES).median()) for steps in (0, WARMUP)}
    largest = {steps: float((first_compressed(steps).abs() / SIZES).max()) for steps in (0, WARMUP)}
    assert 0.5 < median[WARMUP] < 4.0 < median[0]
    assert largest[WARMUP] < 0.2 * largest[0]


@pytest.mark.parametrize("numel", [1, 2, 3, 1000, 4097])
def test_means_are_summed_in_one_order_on_every_processor(numel: int) -> None:
    """Law: half onto half, as these lines of Python do it; torch's own sums go by the instruction set."""
    values = torch.rand(numel, generator=torch.Generator().manual_seed(numel))
    left = values.double().tolist()
    while len(left) > 1:
        half = (len(left) + 1) // 2
        left = [one + (left[half + at] if half + at < len(left) else 0.0) for at, one in enumerate(left[:half])]
    assert fixed_order_sum(values).item() == left[0]
