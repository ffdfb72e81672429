"""Laws of the backend "gradwire": whatever torch.distributed can do on gloo, it can do here, with the same bits.

Ranks are processes; nodes are logical (GRADWIRE_HOSTNAME). Values are small integers, exact in every dtype, so results
are compared with `==` against what each collective means, and against gloo where the meaning is gloo's.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.comms.bootstrap.compat import GroupName
from support.processes import Processes

NODES = {"one node": ["a"] * 4, "2x2": ["a", "a", "b", "b"], "3+1": ["a", "a", "a", "b"]}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
]
LARGE = 1 << 20
"""Elements: enough for a hierarchical plan in several chunks."""

every_cluster = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(numel) * 7 + 3 * rank) % 5).to(dtype)


def total(ranks: list[int], numel: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([contribution(rank, numel, torch.int64) for rank in ranks]).sum(0).to(dtype)


def start(rank: int, backend: str = "gradwire") -> list[int]:
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    assert dist.get_backend() == backend and dist.get_rank() == rank
    return list(range(dist.get_world_size()))


def check_sums(rank: int) -> None:
    ranks = start(rank)
    for dtype in DTYPES:
        for numel in (1, 4099, LARGE + 1) if dtype is torch.float32 else (17, 100_003):
            tensor = contribution(rank, numel, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(ranks, numel, dtype)), (numel, dtype)
    average = contribution(rank, 4099, torch.float32)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert torch.equal(average, total(ranks, 4099, torch.float32) / len(ranks))
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor, op=op)
        assert tensor[0] == {"MIN": 1, "MAX": len(ranks), "PRODUCT": 24}[str(op).split(".")[-1]], op
    complex_sum = torch.full((3,), complex(rank, 1))
    dist.all_reduce(complex_sum)
    assert torch.equal(complex_sum, torch.full((3,), complex(sum(ranks), len(ranks))))
    dist.destroy_process_group()


@every_cluster
def test_all_reduce_is_the_exact_sum(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_sums, nodes=nodes)


def check_shapes(rank: int) -> None:
    ranks = start(rank)
    for shape in ((), (0,), (3, 0, 2), (2, 3, 5)):
        tensor = torch.full(shape, float(rank))
        dist.all_reduce(tensor)
        assert tensor.shape == shape and torch.equal(tensor, torch.full(shape, float(sum(ranks))))
    leaf = torch.ones(8, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.requires_grad and torch.equal(leaf.detach(), torch.full((8,), float(len(ranks))))
    with torch.inference_mode():
        inference = torch.ones(LARGE)
        dist.all_reduce(inference)
        assert torch.equal(inference, torch.full((LARGE,), float(len(ranks))))
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 0]]), torch.tensor([1.0, 2.0]), (5,))
    dist.all_reduce(sparse)
    assert sparse.is_sparse and sparse.to_dense()[0] == 2 * len(ranks) + 1
    dist.destroy_process_group()


@every_cluster
def test_every_shape_and_layout(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_shapes, nodes=nodes)


def everything(rank: int, backend: str) -> list[Tensor]:
    """One of each collective, on exact values; what this rank holds afterwards."""
    ranks = start(rank, backend)
    size = len(ranks)
    held: list[Tensor] = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool):
        mine = contribution(rank, 65, torch.int64).to(dtype)
        for root in ranks:
            copied = mine.clone()
            dist.broadcast(copied, root)
            held.append(copied)
        gathered = torch.empty(size * 65, dtype=dtype)
        dist.all_gather_single(gathered, mine)
        listed = [torch.empty(65, dtype=dtype) for _ in ranks]
        dist.all_gather(listed, mine)
        held += [gathered, *listed]
        if dtype is not torch.bool:
            source = contribution(rank, size * 33, dtype)
            part = torch.empty(33, dtype=dtype)
            dist.reduce_scatter_single(part, source)
            assert torch.equal(source, contribution(rank, size * 33, dtype)), "the source is not to be touched"
            listed_part = torch.empty(33, dtype=dtype)
            dist.reduce_scatter(listed_part, list(source.view(size, 33)))
            held += [part, listed_part]
    reduced = contribution(rank, 9, torch.float32)
    dist.reduce(reduced, 1)
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    on_one: list[Tensor] | None = [torch.empty(2) for _ in ranks] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), on_one, dst=1)
    scattered = torch.empty(2)
    dist.scatter(scattered, [torch.full((2,), float(each)) for each in ranks] if rank == 0 else None, src=0)
    passed = torch.empty(3)
    works = [dist.isend(torch.full((3,), float(rank)), (rank + 1) % size), dist.irecv(passed, (rank - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return [*held, *([reduced] if rank == 1 else []), exchanged, *(on_one or []), scattered, passed]


@pytest.mark.parametrize("nodes", [NODES["one node"], NODES["2x2"]], ids=["one node", "2x2"])
def test_every_collective_has_the_bits_of_gloo(processes: Processes, nodes: list[str]) -> None:
    ours = processes(4, everything, "gradwire", nodes=nodes)
    theirs = processes(4, everything, "gloo")
    for rank, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert len(left) == len(right) > 40
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            assert one.dtype == other.dtype and torch.equal(one, other), (rank, place)


def check_async(rank: int) -> None:
    ranks = start(rank)
    tensors = [contribution(rank, numel, torch.float32) for numel in (3, LARGE, 5, 40_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        assert work is not None
        assert work.wait(timedelta(seconds=30)) and work.is_completed() and work.is_success()
        assert work.result()[0] is tensor and work.get_future().value()[0] is tensor
        assert torch.equal(tensor, total(ranks, tensor.numel(), torch.float32))
    pending = torch.ones(LARGE)
    dist.all_reduce(pending, async_op=True)
    dist.barrier()  # as on gloo, the barrier is behind what was issued before it
    assert pending[-1] == len(ranks)
    doubled = torch.ones(4)
    future = dist.all_reduce(doubled, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert torch.equal(future.wait(), torch.full((4,), 2.0 * len(ranks)))
    dist.destroy_process_group()


@every_cluster
def test_async_works_complete_in_any_order_of_waiting(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_async, nodes=nodes)


def check_coalesced(rank: int) -> None:
    ranks = start(rank)
    group = dist.group.WORLD
    for numels in ((1, 2, 3), (LARGE, 7, 100_001)):
        tensors = [contribution(rank, numel, torch.float32) for numel in numels]
        with dist.distributed_c10d._coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor)
        for tensor in tensors:
            assert torch.equal(tensor, total(ranks, tensor.numel(), torch.float32))
    sources, parts = (
        [torch.full((4 * numel,), rank + 1.0) for numel in (30_000, 5)],
        [torch.empty(30_000), torch.empty(5)],
    )
    gathered = [torch.empty_like(source) for source in sources]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as scattering:
        for part, source in zip(parts, sources, strict=True):
            dist.reduce_scatter_single(part, source, op=dist.ReduceOp.PREMUL_SUM(0.5))
    scattering.wait()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as gathering:
        for output, part in zip(gathered, parts, strict=True):
            dist.all_gather_single(output, part + rank)
    gathering.wait()
    for output in gathered:
        assert torch.equal(output.view(4, -1)[:, 0], torch.tensor([5.0, 6.0, 7.0, 8.0]))
    objects: list[object] = [None] * len(ranks)
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank * 1000)})
    assert objects == [{"rank": each, "text": "x" * (each * 1000)} for each in ranks]
    objects = [f"from {rank}", rank]
    dist.broadcast_object_list(objects, src=2)
    assert objects == ["from 2", 2]
    own: list[object] = [None]
    dist.scatter_object_list(own, [str(each) for each in ranks] if rank == 0 else None, src=0)
    assert own == [str(rank)]
    assert group is not None
    group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)  # type: ignore[attr-defined]  # not in the stubs
    dist.destroy_process_group()


@every_cluster
def test_coalescing_objects_and_monitored_barrier(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_coalesced, nodes=nodes)


def check_missing(rank: int) -> str:
    start(rank)
    group = dist.group.WORLD
    assert group is not None
    message = ""
    if rank != 1:
        try:
            group.monitored_barrier(timedelta(seconds=2))  # type: ignore[attr-defined]  # not in the stubs
        except RuntimeError as error:
            message = str(error)
    store = group.get_group_store()
    everybody = [f"{each} is through" for each in range(4)]
    if rank == 1:
        store.wait([everybody[0], *everybody[2:]])
    store.set(everybody[rank], "")
    if rank == 0:  # the store is here
        store.wait(everybody)
    return message


@every_cluster
def test_monitored_barrier_names_the_missing_rank_as_gloo_does(processes: Processes, nodes: list[str]) -> None:
    first, missing, *others = processes(4, check_missing, nodes=nodes)
    assert "Rank 1 failed to pass monitoredBarrier" in first and not missing
    for rank, message in enumerate(others, 2):
        assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in message


def check_groups(rank: int) -> None:
    start(rank)
    world = dist.group.WORLD
    assert world is not None and world.name() == "gradwire" and world.group_name and world.rank() == rank
    subsets = [[0, 1], [1, 3], [3, 2, 0], [2]]
    made = [dist.new_group(subset, backend="gradwire") for subset in subsets]
    on_gloo = dist.new_group(backend="gloo")
    for subset, group in zip(subsets, made, strict=True):
        if rank in subset:
            assert dist.get_group_rank(group, rank) == sorted(subset).index(rank) and group.size() == len(subset)
            tensor = contribution(rank, 50_000, torch.int64)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, total(subset, 50_000, torch.int64)), subset
            copied = torch.full((3,), rank)
            dist.broadcast(copied, subset[-1], group=group)
            assert copied[0] == subset[-1]
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=on_gloo)
    mine = [0, 2] if rank % 2 == 0 else [1, 3]
    split = world.split_group(mine, group_name=GroupName(f"split{rank % 2}"), group_desc="halves")
    assert split is not None and split.group_name == f"split{rank % 2}" and split.group_desc == "halves"
    work = split.allreduce([tensor.fill_(rank)])
    work.wait()
    assert tensor[0] == sum(mine)
    assert world.split_group([(rank + 1) % 4], group_name=GroupName("others")) is None
    with pytest.raises(ValueError, match="asks for the compressor 'int8', but the backend is exact"):
        world.split_group(mine, opts=gradwire.Config(compressor="int8"))  # type: ignore[arg-type]
    dist.destroy_process_group(made[0]) if rank in subsets[0] else None
    dist.all_reduce(tensor.fill_(1.0))
    assert tensor[0] == 4
    dist.destroy_process_group()


@every_cluster
def test_subsets_and_splits_are_groups_of_their_own(processes: Processes, nodes: list[str]) -> None:
    processes(4, check_groups, nodes=nodes)
