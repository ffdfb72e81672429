"""Laws of fusion: every bucket is reduced once, whatever the plan; nothing in flight is touched; no bit changes."""

import weakref
from datetime import timedelta
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor, finish, pack
from gradwire.compressors.base import Layout, Slice
from support.threads import run_ranks


class Wire:
    """Fusion, and what it launches, kept until it is delivered: doubles every element, or fails."""

    def __init__(self, plan: FusionPlan) -> None:
        self.fusion = Fusion(plan)
        self.flying: list[tuple[AllReduce, Tensor]] = []

    def add(self, flat: Tensor, layout: Layout | None = None) -> FutureTensor:
        bucket = Bucket.of(flat, layout)
        self.flying += [(launch, pack(launch)) for launch in self.fusion.add(bucket)]
        return bucket.result()

    def end_step(self) -> None:
        self.flying += [(launch, pack(launch)) for launch in self.fusion.end_step()]

    def deliver(self, error: Exception | None = None) -> None:
        for launch, flat in self.flying:
            if error is None:
                flat.mul_(2)
            finish(launch, flat, error, None)
        self.flying.clear()


def flying(wire: Wire) -> list[Tensor]:
    return [flat for _, flat in wire.flying]


def buckets(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [torch.arange(end - size, end).to(dtype) for size, end in zip(sizes, ends, strict=True)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], FusionPlan]:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    cuts = draw(st.sets(st.integers(1, len(sizes))))
    known = draw(st.booleans())
    return sizes, FusionPlan(
        tuple(sorted(cuts)) if known else (),
        tuple(4 * size for size in sizes) if known else (),
        draw(st.integers(0, 200)),
        draw(st.integers(0, 60)),
    )


@settings(deadline=None)
@given(plans())
def test_every_bucket_is_reduced_exactly_once(case: tuple[list[int], FusionPlan]) -> None:
    sizes, plan = case
    flats = buckets(sizes)
    expected = [2 * flat for flat in flats]
    wire = Wire(plan)
    futures = [wire.add(flat) for flat in flats]
    wire.end_step()
    assert sum(flat.numel() for flat in flying(wire)) == sum(sizes)
    wire.deliver()
    for flat, future, wanted in zip(flats, futures, expected, strict=True):
        assert future.done()
        assert future.value().data_ptr() == flat.data_ptr()
        assert torch.equal(flat, wanted)


def test_cuts_decide_what_is_launched_when() -> None:
    flats = buckets([4, 4, 4, 4, 4])
    wire = Wire(FusionPlan((1, 3), (16,) * 5))
    launched = []
    for flat in flats:
        wire.add(flat)
        launched.append(len(wire.flying))
    assert launched == [1, 1, 2, 2, 2]
    wire.end_step()
    assert [flat.numel() for flat in flying(wire)] == [4, 8, 8]


def test_other_buckets_than_planned_fall_back_to_the_threshold() -> None:
    # DDP's first step has one bucket, and the buckets are rebuilt after it.
    wire = Wire(FusionPlan((2,), (16, 16), threshold_nbytes=24))
    for flat in buckets([4, 3, 1, 1]):
        wire.add(flat)
    assert [flat.numel() for flat in flying(wire)] == [7]


def test_a_new_plan_waits_for_the_end_of_the_step() -> None:
    wire = Wire(FusionPlan(threshold_nbytes=1000))
    wire.add(torch.ones(4))
    wire.fusion.change(FusionPlan())
    wire.add(torch.ones(4))
    assert not wire.flying
    wire.end_step()
    assert len(wire.flying) == 1
    wire.add(torch.ones(4))
    assert len(wire.flying) == 2


def test_buffers_in_flight_are_not_used_again_and_later_ones_are() -> None:
    wire = Wire(FusionPlan(threshold_nbytes=32))
    for _ in range(2):
        wire.add(torch.ones(4))
        wire.add(torch.ones(4))
    first, second = (flat.data_ptr() for flat in flying(wire))
    assert first != second
    wire.deliver()
    for _ in range(10):
        wire.add(torch.ones(4))
        wire.add(torch.ones(4))
        wire.deliver()
    assert wire.fusion._pool.allocated == 2


def test_buffers_of_an_old_plan_are_not_kept() -> None:
    wire = Wire(FusionPlan(threshold_nbytes=32))
    wire.add(torch.ones(4))
    wire.add(torch.ones(4))
    buffer = weakref.ref(flying(wire)[0])
    wire.fusion.change(FusionPlan(threshold_nbytes=64))
    wire.end_step()
    wire.deliver()  # of the step before the change
    assert buffer() is None


def test_dtypes_do_not_mix_and_layouts_are_joined() -> None:
    wire = Wire(FusionPlan(threshold_nbytes=1 << 20))
    one, two = (Layout((Slice(name, (4,), 0, 0, 4),)) for name in "ab")
    wire.add(torch.ones(4), one)
    wire.add(torch.ones(4), two)
    wire.add(torch.ones(4, dtype=torch.bfloat16), one)
    wire.end_step()
    assert [flat.dtype for flat in flying(wire)] == [torch.float32, torch.bfloat16]
    layout = wire.flying[0][0].layout
    assert layout is not None
    assert [(piece.name, piece.start) for piece in layout.slices] == [("a", 0), ("b", 4)]


@pytest.mark.parametrize("threshold", [0, 1000])
def test_a_failure_reaches_every_bucket_with_its_message(threshold: int) -> None:
    wire = Wire(FusionPlan(threshold_nbytes=threshold, piece_nbytes=8))
    futures = [wire.add(torch.ones(4)) for _ in range(3)]
    wire.end_step()
    wire.deliver(RuntimeError("rank 3 is gone"))
    for future in futures:
        with pytest.raises(RuntimeError, match="rank 3 is gone"):
            future.wait()


@pytest.mark.parametrize(
    "bad",
    [
        {"cuts": (2, 1), "sizes": (1, 1)},
        {"cuts": (0,), "sizes": (1,)},
        {"cuts": (3,), "sizes": (1, 1)},
        {"cuts": (1, 1), "sizes": (1, 1)},
        {"threshold_nbytes": -1},
        {"piece_nbytes": -1},
    ],
)
def test_an_impossible_plan_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"`\w+` is"):
        FusionPlan(**bad)  # type: ignore[arg-type]


PLANS = [
    FusionPlan(),
    FusionPlan(threshold_nbytes=1 << 30),
    FusionPlan(threshold_nbytes=9000),
    FusionPlan(piece_nbytes=700),
    FusionPlan((1, 4), (20_000, 4, 0, 12_004, 6000), piece_nbytes=8000),
]


@pytest.mark.parametrize("nodes", ["aabb", "abc", "aabbc", "abab"])
def test_no_plan_changes_a_bit(nodes: str) -> None:
    store = HashStore()

    def run(rank: int) -> list[Tensor]:
        config = Config(hostname=nodes[rank], fusion=25, timeout=timedelta(seconds=30))
        communicator = Communicator(store, rank, len(nodes), torch.device("cpu"), config, name="fusion")
        communicator.rank_plans.fix_plan(25 << 20)
        fusion = Fusion(PLANS[0])
        results = []
        try:
            for plan in (*PLANS[1:], PLANS[0]):
                generator = torch.Generator().manual_seed(rank)
                flats = [torch.randn(numel, generator=generator) for numel in (5000, 1, 0, 3001, 1500)]
                waiting = [Bucket.of(flat) for flat in flats]
                launches = [launch for bucket in waiting for launch in fusion.add(bucket)]
                fusion.change(plan)
                for launch in launches + fusion.end_step():
                    communicator.start(launch, scale=0.25)
                for bucket in waiting:
                    bucket.result().wait()
                results.append(torch.cat(flats))
        finally:
            communicator.close()
        return results

    for results in run_ranks(len(nodes), run):
        for other in results[1:]:
            assert torch.equal(results[0], other)
