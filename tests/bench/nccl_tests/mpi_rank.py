"""A job of the mpirun tests (mpi_jobs.py): the laws of `Group` over MPI, then DDP with gradwire over MPI."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap import mpi_launch
from gradwire.comms.bootstrap.compat import PrefixStore, store_of
from gradwire.comms.transport.mpi import MpiGroup, connect

TIMEOUT = timedelta(seconds=60)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def inputs(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 17).to(dtype)


def check_group(group: MpiGroup, dtype: torch.dtype, numel: int) -> None:
    own = inputs(group.rank, numel, dtype)
    total = torch.stack([inputs(rank, numel, torch.int64) for rank in range(group.size)]).sum(0).to(dtype)
    reduced = own.clone()
    group.all_reduce(reduced).wait()
    assert torch.equal(reduced, total), (dtype, numel)
    bounds = [0, *sorted(numel * (rank * rank + 1) // (group.size**2 + 1) for rank in range(1, group.size)), numel]
    scattered = own.clone()
    group.reduce_scatter(scattered, bounds).wait()
    mine = slice(bounds[group.rank], bounds[group.rank + 1])
    assert torch.equal(scattered[mine], total[mine])
    group.all_gather_slices(scattered, bounds).wait()
    assert torch.equal(scattered, total)
    gathered = torch.empty(group.size * numel, dtype=dtype)
    group.all_gather(gathered, own).wait()
    assert torch.equal(gathered, torch.cat([inputs(rank, numel, dtype) for rank in range(group.size)]))
    exchanged = torch.empty(group.size, dtype=dtype)
    group.all_to_all(exchanged, torch.full((group.size,), group.rank).to(dtype)).wait()
    assert torch.equal(exchanged, torch.arange(group.size).to(dtype))
    check_exchange(group, own)
    for root in range(group.size):
        copied = own.clone()
        group.broadcast(copied, root).wait()
        assert torch.equal(copied, inputs(root, numel, dtype))


def check_exchange(group: MpiGroup, own: torch.Tensor) -> None:
    """Each rank sends rank + 1 times its first elements to the next one, and nothing to the others."""
    numel, last = min(len(own), 2), (group.rank - 1) % group.size
    sent = own[:numel].repeat(group.rank + 1)
    received = torch.empty(numel * (last + 1), dtype=own.dtype)
    to, by = [0] * group.size, [0] * group.size
    to[(group.rank + 1) % group.size], by[last] = len(sent), len(received)
    group.exchange(received, sent, by, to, sent.nbytes).wait()
    assert torch.equal(received, inputs(last, len(own), own.dtype)[:numel].repeat(last + 1))


def check_many_at_once(group: MpiGroup) -> None:
    tensors = [inputs(group.rank, 1000 + number, torch.float32) for number in range(8)]
    for work in [group.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(
            tensor, torch.stack([inputs(rank, 1000 + number, torch.float32) for rank in range(group.size)]).sum(0)
        )


def check_hook(place: mpi_launch.MpiPlace) -> None:
    torch.manual_seed(0)
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)))
    ours = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)))
    ours.load_state_dict(plain.state_dict())
    # Two logical nodes of two ranks each, so that a phase between nodes exists.
    state = gradwire.HookState(
        ours, transport="mpi", plan={"name": "hierarchical", "chunks": 3}, hostname=f"node{place.rank // 2}"
    )
    ours.register_comm_hook(state, gradwire.comm_hook)
    for step in range(3):
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + place.rank))
        for model in (plain, ours):
            model.zero_grad()
            model(batch).square().mean().backward()
        for left, right in zip(plain.parameters(), ours.parameters(), strict=True):
            assert left.grad is not None and right.grad is not None
            torch.testing.assert_close(left.grad, right.grad)
    assert any(row.level == "inter_node" and row.wire_nbytes for row in state.report().rows)
    state.close()


def main() -> None:
    place = mpi_launch.init_mpi_process_group("gloo", TIMEOUT)
    assert place.world_size == place.local_world_size == 4
    world = dist.group.WORLD
    assert world is not None
    group = connect(PrefixStore("laws", store_of(world)), place.rank, place.world_size, TIMEOUT)
    for dtype in DTYPES:
        for numel in (0, 1, 5, 4099):
            check_group(group, dtype, numel)
    check_many_at_once(group)
    group.close()
    half = place.rank // 2
    pair = connect(PrefixStore(f"pair{half}", store_of(world)), place.rank % 2, 2, TIMEOUT)
    check_group(pair, torch.float32, 777)
    pair.close()
    check_hook(place)
    dist.barrier()
    dist.destroy_process_group()
    if place.rank == 0:
        print("every law holds")
