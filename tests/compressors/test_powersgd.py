"""PowerSGD: exact on low rank, a bounded residual, whole matrices, and no NaN from zeros."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.matrices import as_matrix, cut_between
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.powersgd import PowerSGD
from support.threads import ThreadGroup, take_turns

SHAPE = (60, 80)
LAYOUT = Layout((Slice("w", SHAPE, 0, 0, 4800),))


def reduce(compressor: PowerSGD, shard: Tensor, group: ThreadGroup, layout: Layout = LAYOUT) -> Tensor:
    run_requests(compressor.all_reduce(shard, layout, group.member), group)
    compressor.end_step(bool(shard.isfinite().all()))
    return shard


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    """The second step multiplies by factors that span the first one's columns."""
    groups = ThreadGroup.create(2)
    left, right = torch.randn(60, 2), torch.randn(2, 80)

    def body(rank: int) -> list[Tensor]:
        ours = PowerSGD(rank=2, warmup_steps=0, use_error_feedback=False)
        return [reduce(ours, (rank + 1) * (left @ right).view(-1), groups[rank]) for _ in range(2)]

    torch.testing.assert_close(take_turns(2, body)[0][1].view(SHAPE), 3 * (left @ right), rtol=1e-4, atol=1e-4)


def test_the_residual_stays_bounded() -> None:
    """Noise of zero mean for 300 steps: a residual against the mean of all ranks would walk off as the root of time."""
    size, groups = 4, ThreadGroup.create(4)

    def body(rank: int) -> list[float]:
        ours, norms = PowerSGD(rank=2, warmup_steps=0), []
        for step in range(300):
            reduce(ours, torch.randn(4800, generator=torch.Generator().manual_seed(7 * step + rank)), groups[rank])
            norms.append(float(ours.fields["residual"].read(LAYOUT, torch.device("cpu")).norm()))
        return norms

    for norms in take_turns(size, body):
        assert max(norms[200:]) < 1.25 * max(norms[80:150])


@pytest.mark.parametrize("options", [{}, {"use_error_feedback": False}, {"rank": 1}, {"warm_start": False}])
def test_zeros_give_zeros_and_do_no_lasting_harm(options: dict[str, bool | int]) -> None:
    group, other = ThreadGroup.create(2)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        ours = PowerSGD(warmup_steps=0, **options)  # type: ignore[arg-type]  # a mixture of kinds, by name
        end = (group, other)[rank]
        zeros = reduce(ours, torch.zeros(4800), end)
        for _ in range(4):
            last = reduce(ours, torch.ones(4800), end)
        return zeros, last

    for zeros, last in take_turns(2, body):
        assert not zeros.any()
        torch.testing.assert_close(last, torch.full((4800,), 2.0), rtol=1e-3, atol=1e-3)


def test_an_inf_does_not_poison_the_factors() -> None:
    groups = ThreadGroup.create(2)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        ours, bad = PowerSGD(warmup_steps=0), torch.ones(4800)
        bad[3] = float("inf")
        return reduce(ours, bad, groups[rank]).clone(), reduce(ours, torch.ones(4800), groups[rank])

    for bad, after in take_turns(2, body):
        assert not bad.isfinite().all()
        torch.testing.assert_close(after, torch.full((4800,), 2.0), rtol=1e-3, atol=1e-3)


def test_what_hardly_shrinks_travels_dense() -> None:
    assert as_matrix(Slice("w", (64, 64), 0, 0, 4096), 4, 2.0) is not None
    assert as_matrix(Slice("w", (15, 15), 0, 0, 225), 4, 2.0) is None
    assert as_matrix(Slice("b", (4096,), 0, 0, 4096), 4, 2.0) is None
    assert as_matrix(Slice("w", (64, 64), 0, 0, 4095), 4, 2.0) is None
    convolution = as_matrix(Slice("c", (32, 16, 3, 3), 0, 0, 4608), 4, 2.0)
    assert convolution is not None
    assert (convolution.rows, convolution.columns) == (32, 144)


def test_bytes_of_a_square_layer() -> None:
    layout = Layout((Slice("w", (2048, 2048), 0, 0, 2048 * 2048),))
    assert PowerSGD(rank=4).wire_nbytes(layout, 2) == 4 * 4 * 2 * 2048
    assert PowerSGD(rank=4).wire_nbytes(layout, 2) < 0.01 * 2048 * 2048 * 4


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_matrices_are_dealt_whole_and_evenly(numels: list[int], parts: int, dense_every: int) -> None:
    slices, at = [], 0
    for index, numel in enumerate(numels):
        slices.append(Slice(str(index), (numel,), 0, at, numel))
        at += numel
    layout = Layout(tuple(slices))

    def whole(item: Slice) -> bool:
        return dense_every == 0 or int(item.name) % (dense_every + 1) != 0

    bounds = cut_between(layout, parts, whole)
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, at)
    assert list(bounds) == sorted(bounds)
    for item in slices:
        if whole(item):
            assert not any(item.start < cut < item.stop for cut in bounds)
    longest = max(stop - start for start, stop in pairwise(bounds))
    assert longest <= -(-at // parts) + max(numels)
