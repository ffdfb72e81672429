"""DGC against an independent model of the paper's algorithm in float64."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Member, Slice
from gradwire.compressors.dgc import DGC, pack_places, places_nbytes, unpack_places
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import Option, make
from support.threads import ThreadGroup, take_turns

SIZE, NUMEL = 3, 400
LAYOUT = Layout((Slice("w", (300,), 0, 0, 300), Slice("x", (100,), 0, 300, 100)))


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(17 * step + rank))


def model(steps: int, momentum: float, nesterov: bool, clip: float, density: float, masked: bool) -> list[Tensor]:
    """Source: Lin et al., ICLR 2018, algorithm 4, written with masks instead of indices; `masked` as there."""
    u, v = torch.zeros(2, SIZE, NUMEL, dtype=torch.float64)
    outputs = []
    for step in range(steps):
        total = torch.zeros(NUMEL, dtype=torch.float64)
        for rank in range(SIZE):
            for item in LAYOUT.slices:
                run = slice(item.start, item.stop)
                g = gradient(rank, step)[run].double()
                if clip:
                    g *= min(1.0, clip * SIZE**-0.5 / float(g.norm()))
                u[rank, run] = momentum * (u[rank, run] + g) if nesterov else momentum * u[rank, run] + g
                v[rank, run] += u[rank, run] + (g if nesterov else 0.0)
                kth = v[rank, run].abs().sort(descending=True).values[round(density * item.numel) - 1]
                mask = v[rank, run].abs() >= kth
                total[run] += v[rank, run] * mask
                if masked:
                    u[rank, run] *= ~mask
                v[rank, run] *= ~mask
        outputs.append(total)
    return outputs


@pytest.mark.parametrize("numel", [1, 100, 65_536, 65_537, 131_072, 1_000_003])
def test_places_of_a_stack_take_two_bytes_and_come_back(numel: int) -> None:
    """Windows without a place, places at both ends of one, and so few that whole places are shorter."""
    generator = torch.Generator().manual_seed(numel)
    some = torch.randperm(numel, generator=generator)[: max(1, numel // 50)]
    edges = torch.tensor([0, numel - 1, 65_535, 65_536, 131_071, 131_072])
    for chosen in (some, edges[edges < numel], some[(some < 40_000) | (some > 900_000)], some[:1]):
        places = chosen.unique().int()  # type: ignore[no-untyped-call]
        if not places.numel():
            continue
        packed = pack_places(places, numel)
        assert packed.numel() == places_nbytes(places.numel(), numel)
        apart = torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[1:]
        assert torch.equal(unpack_places(apart, places.numel(), numel), places)
    assert places_nbytes(1000, 1 << 20) == 2060


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("clip", "masked"), [(0.0, True), (5.0, True), (5.0, False)])
def test_it_is_the_papers_algorithm(nesterov: bool, clip: float, masked: bool) -> None:
    groups, steps = ThreadGroup.create(SIZE), 8

    def body(rank: int) -> list[Tensor]:
        ours = DGC(density=0.05, momentum=0.9, nesterov=nesterov, clip_norm=clip, warmup_steps=0, mask_momentum=masked)
        outputs = []
        for step in range(steps):
            shard = gradient(rank, step)
            run_requests(ours.all_reduce(shard, LAYOUT, groups[rank].member), groups[rank])
            ours.end_step(True)
            outputs.append(shard)
        return outputs

    for ours, wanted in zip(take_turns(SIZE, body)[0], model(steps, 0.9, nesterov, clip, 0.05, masked), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_density_falls_in_four_stages() -> None:
    ours, seen = DGC(density=0.001, warmup_steps=8), []
    for _ in range(10):
        seen.append(ours.current_density)
        ours.end_step(True)
    assert seen == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.004, 0.004, 0.001, 0.001]


def test_a_bad_step_does_not_count_towards_the_warm_up() -> None:
    ours = DGC(warmup_steps=1)
    ours.end_step(False)
    assert ours.current_density == 0.25


def test_from_one_element_in_size_the_sum_travels_dense() -> None:
    """Sparse payloads of everybody would be longer than one dense sum."""
    layout = Layout((Slice("w", (4096,), 0, 0, 4096),))
    dense = round(2 * 3 / 4 * 4 * 4096)
    assert DGC(density=0.25, warmup_steps=0).wire_nbytes(layout, 4) == dense
    assert DGC(density=0.2, warmup_steps=0).wire_nbytes(layout, 4) < dense


def test_a_hundredth_is_a_hundredth() -> None:
    layout = Layout((Slice("w", (1000, 1000), 0, 0, 1_000_000),))
    assert DGC(warmup_steps=0).wire_nbytes(layout, 2) == 80_000
    assert DGC(warmup_steps=0, value_dtype="float16").wire_nbytes(layout, 2) == 60_000


def test_a_nan_is_always_among_the_largest() -> None:
    groups = ThreadGroup.create(2)

    def body(rank: int) -> Tensor:
        shard = gradient(rank, 0)
        if rank:
            shard[11] = float("nan")
        run_requests(DGC(warmup_steps=0).all_reduce(shard, LAYOUT, groups[rank].member), groups[rank])
        return shard

    for shard in take_turns(2, body):
        assert shard.isnan().nonzero().tolist() == [[11]]


@pytest.mark.parametrize("norm", [0.5, 1.0, 3.0, float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [0.7, 1.0])
def test_the_factor_of_the_clipping_is_the_hosts(norm: float, clip: float) -> None:
    """Bit for bit what dividing two numbers of the host gives; a norm that is no number clips nothing."""
    numel, size = sum(item.numel for item in LAYOUT.slices), 3
    shard = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * norm
    scales = DGC(clip_norm=clip)._scales(shard, LAYOUT, size)
    assert scales is not None
    for item, scale in zip(LAYOUT.slices, scales, strict=True):
        found = float(torch.linalg.vector_norm(shard[item.start : item.stop]))
        limit = clip * size**-0.5
        wanted = limit / found if limit < found < math.inf else 1.0
        assert torch.equal(scale, torch.tensor(wanted, dtype=torch.float32))


@pytest.mark.parametrize("name", ["int8", "int4", "dgc+int4", "powersgd+int8"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_rounding_is_random_where_that_is_asked_for_and_nowhere_else(name: str, stochastic: bool) -> None:
    groups, layout = ThreadGroup.create(SIZE), Layout((Slice("w", (20, 20), 0, 0, NUMEL),))
    options: dict[str, Option] = {"stochastic": stochastic, "warmup_steps": 0}

    def averages(seed: int) -> Tensor:
        def body(rank: int) -> Tensor:
            compressor, shard = make(name, {**options, "seed": seed}), gradient(rank, 0)
            for _ in range(2):
                shard = gradient(rank, 0)
                run_requests(compressor.all_reduce(shard, layout, groups[rank].member), groups[rank])
                compressor.end_step(True)
            return shard

        first, *others = take_turns(SIZE, body)
        assert all(first.equal(other) for other in others)
        return first

    assert averages(1).equal(averages(2)) is not stochastic


@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_more_elements_than_an_index_reaches_are_refused_in_the_first_step(warmup_steps: int) -> None:
    """Two parameters, each of which fits: the second one's places in the shard do not."""
    half = 2**30
    layout = Layout((Slice("w", (half,), 0, 0, half), Slice("x", (half,), 0, half, half)))
    shard = torch.empty(2 * half, device="meta")
    with pytest.raises(ValueError, match=r"got 2147483648 elements at once; wanted at most 2147483647.*`bucket_cap_mb"):
        next(iter(DGC(warmup_steps=warmup_steps).all_reduce(shard, layout, Member(0, 2))))
