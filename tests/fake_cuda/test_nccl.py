"""Laws of the fake NCCL: exact values, the order of streams, and errors instead of hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, HashStore, PrefixStore, ReduceScatterOptions

from fake_cuda.machine import Machine
from fake_cuda.nccl import FakeNccl, OrderError
from fake_cuda.patch import fake_cuda
from fake_cuda.ranks import run_ranks
from fake_cuda.streams import side_stream

SIZE = 3


def connect(store: HashStore, rank: int, size: int = SIZE, name: str = "group") -> Any:
    options = dist.ProcessGroupNCCL.Options()
    group = dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)
    group.eager_connect_single_device(torch.device("cuda", rank))
    return group


def ranks(body: Callable[[int, FakeNccl], Any], size: int = SIZE, *, check: bool = True) -> tuple[list[Any], Machine]:
    store = HashStore()
    with fake_cuda(size) as running:
        results = run_ranks(running, size, lambda rank: body(rank, connect(store, rank, size)))
        if check:
            running.check()
        return results, running


def own(rank: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(numel) + 10 * rank).to(device="cuda", dtype=dtype)


def total(numel: int = 6) -> Tensor:
    return torch.stack(expected(numel)).sum(0)


def expected(numel: int = 6) -> list[Tensor]:
    return [torch.arange(numel) + 10 * rank for rank in range(SIZE)]


def test_values_of_every_collective() -> None:
    def body(rank: int, group: FakeNccl) -> list[Tensor]:
        options, outputs = dist.AllreduceOptions(), []
        ops: tuple[Any, ...] = (
            dist.ReduceOp.SUM,
            dist.ReduceOp.AVG,
            dist.ReduceOp.MAX,
            torch._C._distributed_c10d._make_nccl_premul_sum(0.5),
        )
        for op in ops:
            options.reduceOp = op
            outputs.append(own(rank))
            group.allreduce([outputs[-1]], options).wait()
        root = dist.BroadcastOptions()
        root.rootRank = 1
        outputs.append(own(rank))
        group.broadcast([outputs[-1]], root).wait()
        gathered, scattered, exchanged = (torch.empty(numel, device="cuda") for numel in (18, 2, 6))
        group._allgather_base(gathered, own(rank).float(), AllgatherOptions()).wait()
        group._reduce_scatter_base(scattered, own(rank).float(), ReduceScatterOptions()).wait()
        group.alltoall_base(exchanged, own(rank).float(), [], [], dist.AllToAllOptions()).wait()
        uneven = torch.empty(3 * (rank + 1), device="cuda")
        group.alltoall_base(uneven, own(rank).float(), [rank + 1] * 3, [1, 2, 3], dist.AllToAllOptions()).wait()
        rows = [torch.empty(3 * (other != 1), device="cuda") for other in range(3)]  # rank 1 has nothing to send
        group.alltoall(rows, [own(rank).float()[: rows[rank].numel()]] * 3, dist.AllToAllOptions()).wait()
        return [each.cpu().float() for each in (*outputs, gathered, scattered, exchanged, uneven, torch.cat(rows))]

    results, _ = ranks(body)
    for rank, found in enumerate(results):
        wanted = [
            total(),
            total() / 3,
            expected()[2],
            total() / 2,
            expected()[1],
            torch.cat(expected()),
            total()[2 * rank : 2 * rank + 2],
            torch.cat([each[2 * rank : 2 * rank + 2] for each in expected()]),
            torch.cat([each[[0, 1, 3][rank] :][: rank + 1] for each in expected()]),
            torch.cat([each[:3] for each in expected()[::2]]),
        ]
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want.float())


@pytest.mark.parametrize("waited", [True, False])
def test_the_result_is_there_when_the_work_was_waited_for(waited: bool) -> None:
    def body(rank: int, group: FakeNccl) -> None:
        x = own(rank)
        work = group.allreduce([x], dist.AllreduceOptions())
        assert work is not None
        if waited:
            work.wait()
        x + 1

    _, running = ranks(body, check=False)
    assert {fault.kind for fault in running.faults} == (set() if waited else {"race"})


@pytest.mark.parametrize("waits_on", ["own stream", "another stream", "nobody"])
def test_a_work_holds_its_tensors_until_it_is_waited_for(waits_on: str) -> None:
    def body(rank: int, group: FakeNccl) -> None:
        work = group.allreduce([own(rank)], dist.AllreduceOptions())
        torch.empty(1, device="cuda")
        assert work is not None
        if waits_on == "own stream":
            work.wait()
        if waits_on == "another stream":
            with torch.cuda.stream(side_stream()):
                work.wait()
        del work
        torch.empty(1, device="cuda")

    _, running = ranks(body, check=False)
    assert {fault.kind for fault in running.faults} == ({"reuse"} if waits_on == "another stream" else set())


def test_futures_and_synchronous_collectives() -> None:
    def body(rank: int, group: FakeNccl) -> list[float]:
        x = own(rank)
        work = group.allreduce([x], dist.AllreduceOptions())
        assert work is not None
        halved = work.get_future().then(lambda done: done.value()[0].div_(2)).wait()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        assert group.allreduce([halved], options) is None
        return list(halved.tolist())

    results, running = ranks(body)
    assert results[0] == (total() * 1.5).tolist()
    assert {entry["stream_name"] for entry in running.schedule()[0] if entry["op"] == "all_reduce"} == {
        "cuda:0 nccl 0",
        "cuda:0 default",
    }


def test_a_group_call_is_one_operation() -> None:
    def body(rank: int, group: FakeNccl) -> list[float]:
        x, y = own(rank), own(rank, 4)
        group._start_coalescing(torch.device("cuda", rank))
        group.allreduce([x], dist.AllreduceOptions())
        group.allreduce([y], dist.AllreduceOptions())
        work = group._end_coalescing(torch.device("cuda", rank))
        assert work is not None
        work.wait()
        return torch.cat([x, y]).tolist()

    results, running = ranks(body)
    assert results[1] == torch.cat([total(), total(4)]).tolist()
    (call,) = [entry for entry in running.schedule()[2] if entry["kind"] == "collective"]
    assert call["op"] == "group of all_reduce, all_reduce"
    assert (call["members"], call["sequence"], call["written_nbytes"]) == ((0, 1, 2), 1, 40)


def test_the_works_of_single_calls_in_a_group_order_nothing() -> None:
    def body(rank: int, group: FakeNccl) -> None:
        x = own(rank)
        group._start_coalescing(torch.device("cuda", rank))
        work = group.allreduce([x], dist.AllreduceOptions())
        group._end_coalescing(torch.device("cuda", rank))
        assert work is not None
        work.wait()
        x + 1

    _, running = ranks(body, check=False)
    assert {fault.kind for fault in running.faults} == {"race"}


MISTAKES: dict[str, Callable[[int, FakeNccl], Any]] = {
    "sizes": lambda rank, group: group.allreduce([own(rank, 6 + (rank == 1))], dist.AllreduceOptions()),
    "dtypes": lambda rank, group: group.allreduce(
        [own(rank, 6, torch.float16 if rank == 1 else torch.float32)], dist.AllreduceOptions()
    ),
    "operation": lambda rank, group: (
        group.broadcast([own(rank)], dist.BroadcastOptions())
        if rank == 1
        else group.allreduce([own(rank)], dist.AllreduceOptions())
    ),
    "order": lambda rank, group: [
        group.allreduce([own(rank, numel)], dist.AllreduceOptions()) for numel in ([4, 8] if rank else [8, 4])
    ],
    "one too few": lambda rank, group: rank == 1 or group.allreduce([own(rank)], dist.AllreduceOptions()),
    "parts": lambda rank, group: group.alltoall_base(
        own(rank), own(rank), [2, 2, 2], [1, 2, 3] if rank else [2, 2, 2], dist.AllToAllOptions()
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_disagreement_is_an_error_that_shows_everybodys_sequence(mistake: str) -> None:
    with pytest.raises(OrderError) as caught:
        ranks(MISTAKES[mistake])
    assert "communicator 0 of the ranks (0, 1, 2)" in str(caught.value)
    assert all(f"rank {rank}: " in str(caught.value) for rank in range(SIZE))


def test_communicators_in_opposite_orders_do_not_hang() -> None:
    store = HashStore()

    def body(rank: int, first: FakeNccl) -> None:
        second = connect(store, rank, name="second")
        for group in (first, second) if rank else (second, first):
            group.allreduce([own(rank)], dist.AllreduceOptions())

    with pytest.raises(OrderError, match="every rank waits"):
        ranks(body)


def test_a_failing_rank_ends_the_others_and_its_own_error_comes_out() -> None:
    def body(rank: int, group: FakeNccl) -> None:
        if rank == 1:
            raise KeyError("mine")
        group.allreduce([own(rank)], dist.AllreduceOptions())

    with pytest.raises(KeyError, match="mine"):
        ranks(body)


def test_abort_wakes_the_members_that_wait() -> None:
    def body(rank: int, group: FakeNccl) -> str:
        if rank == 1:
            group.abort()
            return ""
        with pytest.raises(RuntimeError, match="aborted: by rank 1"):
            group.allreduce([own(rank)], dist.AllreduceOptions())
        return "woken"

    assert ranks(body)[0] == ["woken", "", "woken"]
