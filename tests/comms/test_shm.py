"""Laws of the shared-memory collectives, with threads as ranks: sums of small integers are exact in every dtype."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gradwire.comms.errors import MismatchError, PeerError
from gradwire.comms.transport.shm import ShmGroup
from gradwire.comms.transport.threads import run_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
HALVES = [torch.float16, torch.bfloat16]
BLOCK_NBYTES = 4096  # small: a few thousand elements already stream through several chunks
LARGE = 30_011


def on_groups(size: int, body: Callable[[ShmGroup], None], seconds: float = 60.0, block: int = BLOCK_NBYTES) -> None:
    """Runs `body` on `size` ranks; closes the groups only when all are through, as a barrier at the end would."""
    store = HashStore()

    def run(rank: int) -> None:
        group = ShmGroup.create(store, rank, size, key="laws", timeout=timedelta(seconds=seconds), block_nbytes=block)
        try:
            body(group)
        finally:
            group.close()

    run_ranks(size, run)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(numel) * 7 + 3 * rank) % 11).to(dtype)


def total(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([contribution(rank, numel, torch.int64) for rank in range(size)]).sum(0).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_is_the_exact_sum(size: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup) -> None:
        for numel in (0, 1, 2, 63, 1021, 4097, LARGE):
            tensor = contribution(group.rank, numel, dtype)
            group.all_reduce(tensor).wait()
            assert same_bits(tensor, total(size, numel, dtype)), numel

    on_groups(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_then_all_gather_slices_is_all_reduce(size: int, dtype: torch.dtype) -> None:
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
def test_max_and_min(dtype: torch.dtype, op: str) -> None:
    def body(group: ShmGroup) -> None:
        for numel in (1, 5000):
            everybody = torch.stack([contribution(rank, numel, dtype) for rank in range(3)])
            wanted = everybody.amax(0) if op == "max" else everybody.amin(0)
            tensor = contribution(group.rank, numel, dtype)
            group.all_reduce(tensor, op=op)
            assert same_bits(tensor, wanted)

    on_groups(3, body)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_changes_the_root_alone(size: int) -> None:
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
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int8, torch.int16, torch.complex64, torch.complex128],
                         ids=str)
def test_copies_take_every_dtype(size: int, dtype: torch.dtype) -> None:
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
        assert torch.equal(slices, torch.cat([everybody[rank][bounds[rank]:bounds[rank + 1]] for rank in range(size)]))
        group.barrier()

    on_groups(size, body)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_run_in_rank_order_and_round_once(size: int, dtype: torch.dtype) -> None:
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
def test_infinity_and_nan_go_through(dtype: torch.dtype, numel: int) -> None:
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
def test_every_half_survives_the_way_through_float32(dtype: torch.dtype) -> None:
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
def test_unaligned_views(offset: int, numel: int, size: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup) -> None:
        guard = torch.full((numel + offset + 3,), 77, dtype=dtype)
        view = guard[offset:offset + numel]
        view.copy_(contribution(group.rank, numel, dtype))
        group.all_reduce(view)
        assert same_bits(view, total(size, numel, dtype))
        group.all_gather_slices(view, [0] * size + [numel])
        group.broadcast(view, 0)
        assert (guard[:offset] == 77).all() and (guard[offset + numel:] == 77).all()

    on_groups(size, body)


def test_shapes_do_not_matter() -> None:
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

def test_arguments_are_checked_before_anything_moves() -> None:
    group = ShmGroup.create(HashStore(), 0, 1, key="alone", timeout=timedelta(seconds=5))
    tensor = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"`tensor` of shape \(6, 4\) is not contiguous"):
        group.all_reduce(tensor.t())
    with pytest.raises(ValueError, match="`tensor` is on device meta"):
        group.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match=r"`tensor` has dtype torch.complex64"):
        group.all_reduce(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"`scale` is 0.5 for an integer"):
        group.all_reduce(torch.ones(3, dtype=torch.int32), 0.5)
    with pytest.raises(ValueError, match="`op` is 'mean'"):
        group.all_reduce(tensor, op="mean")
    with pytest.raises(ValueError, match="`root` is 1"):
        group.broadcast(tensor, 1)
    with pytest.raises(ValueError, match="`bounds`"):
        group.reduce_scatter(tensor.view(-1), [0, 23])
    with pytest.raises(ValueError, match="`output` has 24 elements"):
        group.all_gather(tensor, torch.ones(5))
    group.all_reduce(tensor)
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        group.all_reduce(tensor)


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"size": 0}, {"block_nbytes": 100},
                                   {"timeout": timedelta(0)}], ids=str)
def test_create_names_the_bad_argument(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"rank": 0, "size": 2, "timeout": timedelta(seconds=5), **wrong}
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        ShmGroup.create(HashStore(), key="bad", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3])
def test_mismatch_is_an_error_on_every_rank(size: int) -> None:
    def other_numel(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match=r"`tensor` differs.*numel 1[01], dtype float32.*numel 1[01]"):
            group.all_reduce(torch.ones(10 + (group.rank == 1)))
        with pytest.raises(MismatchError):  # once failed, failed for good
            group.barrier()

    def other_dtype(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="float16"):
            group.all_reduce(torch.ones(50_000, dtype=torch.float32 if group.rank else torch.float16))

    def other_bounds(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="`bounds` differ"):
            group.reduce_scatter(torch.ones(8), [0, 4 + group.rank, *[8] * (group.size - 1)])

    def other_collective(group: ShmGroup) -> None:
        with pytest.raises(MismatchError, match="broadcast"):
            group.broadcast(torch.ones(8), 0) if group.rank == 0 else group.all_reduce(torch.ones(8))

    for body in (other_numel, other_dtype, other_bounds, other_collective):
        on_groups(size, body)


def test_time_out_names_who_is_missing() -> None:
    def body(group: ShmGroup) -> None:
        if group.rank != 2:
            with pytest.raises(PeerError, match="rank 2 did not come to all_reduce within `timeout`") as caught:
                group.all_reduce(torch.ones(10))
            assert caught.value.missing == (2,)
        else:
            with pytest.raises(PeerError, match="did not come"):  # late: the group is given up already
                time.sleep(1.5)
                group.barrier()

    on_groups(3, body, seconds=0.5)


def test_abort_wakes_every_waiter_with_the_reason() -> None:
    def body(group: ShmGroup) -> None:
        if group.rank == 0:
            group.abort("the loss is purple")
        with pytest.raises(PeerError, match="the loss is purple"):
            group.barrier()
        with pytest.raises(PeerError, match="the loss is purple"):
            group.all_reduce(torch.ones(3))

    on_groups(3, body)


def test_a_rank_that_never_comes_to_create() -> None:
    before = set(Path("/dev/shm").glob("gradwire-*"))
    with pytest.raises(PeerError, match=r"ranks \(1, 2\) did not come") as caught:
        ShmGroup.create(HashStore(), 0, 3, key="lonely", timeout=timedelta(seconds=0.3))
    assert caught.value.missing == (1, 2)
    assert set(Path("/dev/shm").glob("gradwire-*")) <= before


def test_ranks_that_disagree_about_the_group() -> None:
    store = HashStore()

    def body(rank: int) -> None:
        with pytest.raises((ValueError, PeerError), match="`block_nbytes` is 8192 here and 4096 on rank 0"):
            ShmGroup.create(store, rank, 2, key="k", timeout=timedelta(seconds=20), block_nbytes=4096 * (1 + rank))

    run_ranks(2, body)
