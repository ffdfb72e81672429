"""Laws of planned all_gather, reduce_scatter and broadcast, ranks as threads: what each collective means, exactly."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from gradwire.comms.backend.planned_collectives import PlannedCollectives, together
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from support.threads import run_ranks

Result = TypeVar("Result")
CPU = torch.device("cpu")
NODES = {
    "2x2": "aabb",
    "2x2 round-robin": "abab",
    "3+1": "aaab",
    "3x2 scrambled": "abcbca",
    "2+1+2": "aabcc",
    "1x3": "aaa",
    "3x1": "abc",
}
SUMS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
]
COPIES = [*SUMS, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
every_cluster = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)


def on_ranks(nodes: str, body: Callable[[PlannedCollectives, int], Result], **options: object) -> Sequence[Result]:
    """Runs `body(collectives, rank)`; a rank's node is its letter in `nodes`."""
    store = HashStore()

    def run(rank: int) -> Result:
        settings = {"timeout": timedelta(seconds=20)} | options
        config = Config(hostname=nodes[rank], **settings)  # type: ignore[arg-type]
        communicator = Communicator(store, rank, len(nodes), CPU, config, name="test")
        try:
            return body(PlannedCollectives(communicator), rank)
        finally:
            communicator.close()

    return run_ranks(len(nodes), run)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers: sums of up to six are exact in every dtype."""
    values = (torch.arange(numel) * 7 + 3 * rank) % 5
    return values.to(torch.float32).to(dtype) if dtype is torch.float8_e4m3fn else values.to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


@every_cluster
def test_every_dtype_and_size_has_its_meaning(nodes: str) -> None:
    size = len(nodes)
    numels = (0, 1, 5, 1027)

    def body(collectives: PlannedCollectives, rank: int) -> None:
        gathered, copied, summed = [], [], []
        for numel in numels:
            for dtype in COPIES:
                output = torch.empty(size * numel, dtype=dtype)
                gathered.append((collectives.all_gather(output, contribution(rank, numel, dtype)), output))
                tensor = contribution(rank, numel, dtype)
                copied.append((collectives.broadcast(tensor, numel % size), tensor))
            for dtype in SUMS:
                part, source = torch.empty(numel, dtype=dtype), contribution(rank, size * numel, dtype)
                summed.append((collectives.reduce_scatter(part, source), part, source))
        for future, output in gathered:
            assert future.wait()[0] is output
            numel = output.numel() // size
            expected = torch.cat([contribution(each, numel, torch.int64) for each in range(size)])
            assert same(output, contribution_like(expected, output.dtype)), (output.dtype, numel)
        for future, tensor in copied:
            assert future.wait()[0] is tensor
            assert same(tensor, contribution(tensor.numel() % size, tensor.numel(), tensor.dtype))
        for future, part, source in summed:
            assert future.wait()[0] is part
            total = sum(contribution(each, source.numel(), torch.int64) for each in range(size))
            own = torch.as_tensor(total)[rank * part.numel() : (rank + 1) * part.numel()]
            assert same(part, own.to(part.dtype)), (part.dtype, part.numel())
            assert same(source, contribution(rank, source.numel(), source.dtype)), "the source is as it was"

    on_ranks(nodes, body, plan={"chunks": 3})


def contribution_like(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(torch.float32).to(dtype) if dtype is torch.float8_e4m3fn else values.to(dtype)


@every_cluster
def test_large_tensors_strided_inference_in_place_and_listed(nodes: str) -> None:
    size, numel = len(nodes), 150_000  # messages above 256 KiB: both directions of a link at once

    def body(collectives: PlannedCollectives, rank: int) -> None:
        mine = contribution(rank, numel, torch.float32)
        everything = torch.cat([contribution(each, numel, torch.float32) for each in range(size)])
        whole = contribution(rank, size * numel, torch.float32)
        total = torch.as_tensor(sum(contribution(each, size * numel, torch.float32) for each in range(size)))
        own_total = total[rank * numel : (rank + 1) * numel]
        # in place
        output = torch.zeros(size * numel)
        output[rank * numel : (rank + 1) * numel] = mine
        collectives.all_gather(output, output[rank * numel : (rank + 1) * numel]).wait()
        assert torch.equal(output, everything)
        source = whole.clone()
        part = source[rank * numel : (rank + 1) * numel]
        collectives.reduce_scatter(part, source, 0.5).wait()
        expected = whole.clone()
        expected[rank * numel : (rank + 1) * numel] = own_total * 0.5
        assert torch.equal(source, expected)
        for start in (0, 1, (size - 1) * numel):  # into any part of the input, also across two
            source, expected = whole.clone(), whole.clone()
            collectives.reduce_scatter(source[start : start + numel], source).wait()
            expected[start : start + numel] = own_total
            assert torch.equal(source, expected)
        # strided, and of several dimensions
        spread = torch.zeros(2 * size, numel).t()[:, ::2]
        collectives.all_gather(spread, mine.view(-1, 2).t().contiguous().t()).wait()
        assert torch.equal(spread.reshape(-1), everything)
        strided = torch.zeros(2 * numel)[::2]
        gaps = torch.zeros(2 * size * numel)
        gaps[::2] = whole
        collectives.reduce_scatter(strided, gaps[::2]).wait()
        assert torch.equal(strided, own_total) and torch.equal(gaps[::2], whole) and not gaps[1::2].any()
        root = size - 1
        columns = torch.full((2, numel // 2), float(rank)).t()
        collectives.broadcast(columns, root).wait()
        assert (columns == root).all()
        one = torch.full((1, 2), float(rank))[:, 0]  # contiguous to torch, which does not view it as bytes
        collectives.broadcast(one, root).wait()
        assert one.item() == root
        # made in inference mode
        with torch.inference_mode():
            inferred = torch.empty(size * numel)
            collectives.all_gather(inferred, mine.clone()).wait()
            assert torch.equal(inferred, everything)
            piece = torch.empty(numel)
            collectives.reduce_scatter(piece, whole.clone()).wait()
            assert torch.equal(piece, own_total)
            copied = torch.full((numel,), float(rank))
            collectives.broadcast(copied, 0).wait()
            assert not copied.any()
        leaf = torch.zeros(numel, requires_grad=True)
        collectives.broadcast(leaf, 0).wait()
        assert leaf.requires_grad and leaf.is_leaf
        # lists, apart and end to end
        apart = [torch.empty(numel) for _ in range(size)]
        joined = list(torch.empty(size, numel))
        futures = [collectives.all_gather_list(apart, mine), collectives.all_gather_list(joined, mine)]
        assert len(together(futures).wait()) == 2 * size
        assert torch.equal(torch.cat(apart), everything) and torch.equal(torch.cat(joined), everything)
        collectives.reduce_scatter_list(piece := torch.empty(numel), list(whole.view(size, numel))).wait()
        assert torch.equal(piece, own_total)

    on_ranks(nodes, body)


@pytest.mark.parametrize("nodes", ["abab", "aaab", "aabcc"])
def test_sums_have_the_same_bits_in_every_run_and_narrow_ones_are_made_in_float32(nodes: str) -> None:
    size, numel = len(nodes), 3001

    def body(collectives: PlannedCollectives, rank: int) -> list[Tensor]:
        source = torch.randn(size * numel, generator=torch.Generator().manual_seed(rank))
        parts = [torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)]
        for part in parts:
            collectives.reduce_scatter(part, source.to(part.dtype), 1 / 3).wait()
        collectives.reduce_scatter(rounded := torch.empty(numel, dtype=torch.bfloat16), eight_bits(rank)).wait()
        return [*parts, rounded]

    def eight_bits(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-255, 256, (size * numel,), generator=generator).to(torch.bfloat16)

    first, second = on_ranks(nodes, body), on_ranks(nodes, body)
    assert all(same(*pair) for left, right in zip(first, second, strict=True) for pair in zip(left, right, strict=True))
    sources = [torch.randn(size * numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    total = sum(source.double() for source in sources) / 3
    exact = torch.cat([parts[0] for parts in first]).double()
    torch.testing.assert_close(exact, torch.as_tensor(total), rtol=1e-5, atol=1e-6)
    total = torch.zeros(size * numel)
    for node in dict.fromkeys(nodes):  # sums of nodes are rounded, and the sum of those; nothing in between
        members = [eight_bits(rank).float() for rank in range(size) if nodes[rank] == node]
        total += torch.stack(members).sum(0).to(torch.bfloat16)
    assert same(torch.cat([parts[2] for parts in first]), total.to(torch.bfloat16))


def test_a_rank_that_gives_up_ends_the_collective_on_all_ranks() -> None:
    def body(collectives: PlannedCollectives, rank: int) -> str:
        whole, part = torch.ones(4000), torch.ones(1000)
        if rank == 2:
            time.sleep(0.2)
            collectives._communicator.abort("rank 2 has had enough")
            return "abort"
        with pytest.raises(RuntimeError) as caught:
            collectives.reduce_scatter(part, whole).wait()
        return str(caught.value)

    for rank, message in enumerate(on_ranks("aabb", body, timeout=timedelta(seconds=3))):
        assert rank == 2 or ("reduce_scatter" in message and "failed on rank" in message), message


def test_bad_input_is_named() -> None:
    def body(collectives: PlannedCollectives, rank: int) -> None:
        with pytest.raises(ValueError, match="`output` has 5 elements"):
            collectives.all_gather(torch.empty(5), torch.empty(2))
        with pytest.raises(ValueError, match="`source` has 4 elements"):
            collectives.reduce_scatter(torch.empty(2, dtype=torch.float64), torch.empty(4))
        with pytest.raises(ValueError, match="`root` is 2"):
            collectives.broadcast(torch.empty(2), 2)

    on_ranks("ab", body)
