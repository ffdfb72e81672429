"""Laws of the shared-memory collectives, with threads as ranks: sums of small integers are exact in every dtype."""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gradwire.comms.transport.shm import ShmGroup
from support.threads import run_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
HALVES = [torch.float16, torch.bfloat16]
BLOCK_NBYTES = 4096  # small: a few thousand elements already stream through several chunks
LARGE = 30_011


class OnGroups(Protocol):
    """The fixture `on_groups`: runs a body on every rank of a new group, ranks as threads."""

    def __call__(self, size: int, body: Callable[[ShmGroup], None], seconds: float = ..., block: int = ...) -> None: ...


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(numel) * 7 + 3 * rank) % 11).to(dtype)


def total(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([contribution(rank, numel, torch.int64) for rank in range(size)]).sum(0).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_is_the_exact_sum(on_groups: OnGroups, size: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup) -> None:
        for numel in (0, 1, 2, 63, 1021, 4097, LARGE):
            tensor = contribution(group.rank, numel, dtype)
            group.all_reduce(tensor).wait()
            assert same_bits(tensor, total(size, numel, dtype)), numel

    on_groups(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_then_all_gather_slices_is_all_reduce(
    on_groups: OnGroups, size: int, dtype: torch.dtype
) -> None:
    def body(group: ShmGroup) -> None:
        for numel in (0, 1, 17, LARGE):
            cuts = [0, numel // 3, numel // 3, numel - numel // 7, numel, numel]
            for bounds in ([*cuts[:size], numel], [0] * size + [numel], [0] + [numel] * size):
                tensor = contribution(group.rank, numel, dtype)
                group.reduce_scatter(tensor, bounds)
                own = slice(bounds[group.rank], bounds[group.rank + 1])
                assert same_bits(tensor[own], total(size, numel, dtype)[own])
                group.all_gather_slices(tensor, bounds)
                assert same_bits(tensor, total(size, numel, dtype)), (numel, bounds)

    on_groups(size, body)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min(on_groups: OnGroups, dtype: torch.dtype, op: str) -> None:
    def body(group: ShmGroup) -> None:
        for numel in (1, 5000):
            everybody = torch.stack([contribution(rank, numel, dtype) for rank in range(3)])
            wanted = everybody.amax(0) if op == "max" else everybody.amin(0)
            tensor = contribution(group.rank, numel, dtype)
            group.all_reduce(tensor, op=op)
            assert same_bits(tensor, wanted)

    on_groups(3, body)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_changes_the_root_alone(on_groups: OnGroups, size: int) -> None:
    def body(group: ShmGroup) -> None:
        for root in range(size):
            for numel in (0, 3, LARGE):
                tensor = contribution(group.rank, numel, torch.float32)
                group.reduce(tensor, root)
                mine = group.rank == root
                wanted = total(size, numel, torch.float32) if mine else contribution(group.rank, numel, torch.float32)
                assert same_bits(tensor, wanted)

    on_groups(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.bool, torch.int8, torch.int16, torch.complex64, torch.complex128], ids=str
)
def test_copies_take_every_dtype(on_groups: OnGroups, size: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup) -> None:
        everybody = [contribution(rank, 3 * size * 701, torch.int64).to(dtype) for rank in range(size)]
        own = everybody[group.rank]
        gathered = torch.empty(size * own.numel(), dtype=dtype)
        group.all_gather(gathered, own)
        assert torch.equal(gathered, torch.cat(everybody))
        exchanged = torch.empty_like(own)
        group.all_to_all(exchanged, own)
        assert torch.equal(exchanged, torch.cat([other.chunk(size)[group.rank] for other in everybody]))
        sent = own.clone()
        group.broadcast(sent, size - 1)
        assert torch.equal(sent, everybody[-1])
        bounds = [0, *range(1, size), own.numel()]
        slices = own.clone()
        group.all_gather_slices(slices, bounds)
        assert torch.equal(
            slices, torch.cat([everybody[rank][bounds[rank] : bounds[rank + 1]] for rank in range(size)])
        )
        group.barrier()

    on_groups(size, body)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_run_in_rank_order_and_round_once(on_groups: OnGroups, size: int, dtype: torch.dtype) -> None:
    scale = 1.0 / 3.0
    generator = torch.Generator().manual_seed(1)
    everybody = [torch.randn(LARGE, generator=generator).to(dtype) for _ in range(size)]
    wanted = everybody[0].float() * scale
    for other in everybody[1:]:
        wanted = wanted + other.float() * scale
    rounded = wanted.to(dtype)

    def body(group: ShmGroup) -> None:
        for numel in (LARGE, 100):
            tensor = everybody[group.rank][:numel].clone()
            group.all_reduce(tensor, scale)
            assert same_bits(tensor, rounded[:numel])
            group.reduce_scatter(scattered := everybody[group.rank][:numel].clone(), [0] * size + [numel], scale)
            assert group.rank < size - 1 or same_bits(scattered, rounded[:numel])

    on_groups(size, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("numel", [16, 9001])
def test_infinity_and_nan_go_through(on_groups: OnGroups, dtype: torch.dtype, numel: int) -> None:
    def body(group: ShmGroup) -> None:
        tensor = torch.full((numel,), 1.0, dtype=dtype)
        largest = torch.finfo(dtype).max
        tensor[0] = largest
        tensor[1] = float("nan") if group.rank == 1 else 1.0
        tensor[2] = float("inf") if group.rank == 0 else float("-inf")
        tensor[3] = float("inf") if group.rank == 2 else 1.0
        group.all_reduce(tensor)
        assert tensor[0] == float("inf") and tensor[1].isnan() and tensor[2].isnan() and tensor[3] == float("inf")
        assert (tensor[4:] == 3).all()

    on_groups(3, body)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_survives_the_way_through_float32(on_groups: OnGroups, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[~every.isnan()]

    def body(group: ShmGroup) -> None:
        group.all_reduce(tensor := every.clone(), 1.0)
        assert same_bits(tensor, every)
        group.all_reduce(nothing := torch.zeros(len(every), dtype=dtype))
        assert not nothing.any()

    on_groups(1, body)


@settings(max_examples=25, deadline=None)
@given(offset=st.integers(0, 15), numel=st.integers(0, 9000), size=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
def test_unaligned_views(on_groups: OnGroups, offset: int, numel: int, size: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup) -> None:
        guard = torch.full((numel + offset + 3,), 77, dtype=dtype)
        view = guard[offset : offset + numel]
        view.copy_(contribution(group.rank, numel, dtype))
        group.all_reduce(view)
        assert same_bits(view, total(size, numel, dtype))
        group.all_gather_slices(view, [0] * size + [numel])
        group.broadcast(view, 0)
        assert (guard[:offset] == 77).all() and (guard[offset + numel :] == 77).all()

    on_groups(size, body)


def test_shapes_do_not_matter(on_groups: OnGroups) -> None:
    def body(group: ShmGroup) -> None:
        for shape in ((), (1,), (3, 0, 2), (4, 5, 6)):
            group.all_reduce(tensor := torch.ones(shape))
            assert torch.equal(tensor, torch.full(shape, 2.0))

    on_groups(2, body)


def test_two_groups_in_two_threads_each() -> None:
    store = HashStore()

    def body(number: int) -> None:
        rank, key = number % 2, f"group {number // 2}"
        group = ShmGroup.create(store, rank, 2, key=key, timeout=timedelta(seconds=60), block_nbytes=BLOCK_NBYTES)
        for step in range(200):
            group.all_reduce(tensor := torch.full((1 + step * 31,), float(number)))
            assert (tensor == (1 if number < 2 else 5)).all()
        group.close()

    run_ranks(4, body)


# --- what is refused ---------------------------------------------------------------------------------------------
