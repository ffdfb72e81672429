"""Laws of the group around torch's own: no collective of C++ runs with the GIL in hand; strides change no value.

Ranks are processes; nodes are logical (GRADWIRE_HOSTNAME).
"""

import inspect
import logging
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.backend.delegating_group import DelegatingGroup
from support.processes import Processes, Said

NODES = {"one node": ["a"] * 4, "2x2": ["a", "a", "b", "b"]}
SHAPE = (4, 6)
"""Small: on several nodes the plan is flat, and torch's gloo makes the sum."""
LARGE = (1024, 600)
"""Enough for a hierarchical plan."""
GAP = -7.0

every_cluster = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())


def test_every_collective_that_the_trampoline_knows_is_python() -> None:
    # In a folder `py` of its own from torch 2.15 on.
    [header] = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    trampoline = (
        header.read_text().partition("using ProcessGroup::ProcessGroup")[2].partition("PythonOnCompletionHook")[0]
    )
    gloo_lacks = {"endCoalescing", "reconfigure"}
    names = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", trampoline)) - gloo_lacks
    assert {"allreduce", "allgather", "reduce_scatter", "send"} <= names
    assert [name for name in sorted(names) if not inspect.isfunction(getattr(DelegatingGroup, name))] == []


def start(rank: int) -> int:
    dist.init_process_group("gradwire", timeout=timedelta(seconds=60))
    assert dist.get_rank() == rank
    return dist.get_world_size()


def gather_often(rank: int) -> None:
    import torch.distributed._functional_collectives as functional

    size = start(rank)
    group = dist.group.WORLD
    assert group is not None
    for step in range(150):
        mine = torch.full((3,), float(rank + step))
        gathered = functional.all_gather_tensor(mine, 0, group)
        summed = functional.reduce_scatter_tensor(torch.arange(float(size)) + step, "sum", 0, group)
        assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(3) + step)
        assert torch.equal(summed, torch.tensor([float(size * (rank + step))]))
    dist.destroy_process_group()


@every_cluster
def test_functional_collectives_do_not_wait_for_gloos_threads(processes: Processes, nodes: list[str]) -> None:
    processes(4, gather_often, nodes=nodes)


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small integers, exact in every sum."""
    return (torch.arange(float(torch.Size(shape).numel())) * 7 + 3 * seed).fmod(5).view(shape)


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def laid(value: Tensor, layout: str, rank: int) -> Tensor:
    """`value` with gaps between its elements, transposed in memory, or the latter on some ranks only."""
    if layout == "gaps":
        tensor = torch.full((*value.shape[:-1], 2 * value.shape[-1]), GAP)[..., ::2]
    elif layout == "transposed" or rank % 2:
        tensor = torch.empty(value.t().shape).t()
    else:
        tensor = torch.empty(value.shape)
    assert tensor.is_contiguous() == (layout == "mixed" and rank % 2 == 0)
    return tensor.copy_(value)


def check_sums(rank: int, layout: str) -> None:
    size = start(rank)
    for shape in (SHAPE, LARGE):
        ranks = [values(shape, each) for each in range(size)]
        for op, expected in (
            (dist.ReduceOp.SUM, total(ranks)),
            (dist.ReduceOp.AVG, total(ranks) / size),
            (dist.ReduceOp.MAX, torch.stack(ranks).amax(0)),
        ):
            if op == dist.ReduceOp.AVG and shape == SHAPE:
                continue  # a flat plan leaves it to gloo, which has no average
            tensor = laid(ranks[rank], layout, rank)
            dist.all_reduce(tensor, op=op)
            assert torch.equal(tensor, expected), (shape, op)
            storage = torch.empty(0).set_(tensor.untyped_storage())
            assert layout != "gaps" or (storage[1::2] == GAP).all(), "the gaps are not to be touched"
        first, second = laid(ranks[rank], layout, rank), laid(ranks[rank] + 1, layout, rank)
        with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
            dist.all_reduce(first)
            dist.all_reduce(second)
        assert torch.equal(first, total(ranks)) and torch.equal(second, total(ranks) + size)
        with torch.inference_mode():
            inference = laid(ranks[rank], layout, rank)
            dist.all_reduce(inference)
            assert torch.equal(inference, total(ranks))
    work = dist.all_reduce(laid(values(SHAPE, rank), layout, rank), async_op=True)
    assert work is not None
    assert torch.equal(work.get_future().wait()[0], total([values(SHAPE, each) for each in range(size)]))
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["gaps", "transposed", "mixed"])
@every_cluster
def test_strided_tensors_are_summed_by_value(processes: Processes, nodes: list[str], layout: str) -> None:
    processes(4, check_sums, layout, nodes=nodes)


def check_others(rank: int, layout: str) -> None:
    size = start(rank)
    ranks = [values(SHAPE, each) for each in range(size)]

    def mine(value: Tensor) -> Tensor:
        return laid(value, layout, rank)

    def blanks() -> list[Tensor]:
        return [mine(torch.zeros(SHAPE)) for _ in ranks]

    copied = mine(ranks[rank])
    dist.broadcast(copied, 2)
    assert torch.equal(copied, ranks[2])
    reduced = mine(ranks[rank])
    dist.reduce(reduced, 1)
    assert rank != 1 or torch.equal(reduced, total(ranks))
    listed = blanks()
    dist.all_gather(listed, mine(ranks[rank]))
    assert torch.equal(torch.stack(listed), torch.stack(ranks))
    on_one = blanks() if rank == 1 else None
    dist.gather(mine(ranks[rank]), on_one, dst=1)
    assert on_one is None or torch.equal(torch.stack(on_one), torch.stack(ranks))
    scattered = mine(torch.zeros(SHAPE))
    dist.scatter(scattered, [mine(each) for each in ranks] if rank == 1 else None, src=1)
    assert torch.equal(scattered, ranks[rank])
    gathered = mine(torch.zeros(size * SHAPE[0], SHAPE[1]))
    dist.all_gather_single(gathered, mine(ranks[rank]))
    assert torch.equal(gathered, torch.cat(ranks))
    source = mine(torch.cat(ranks) + rank)
    part = mine(torch.zeros(SHAPE))
    dist.reduce_scatter_single(part, source)
    assert torch.equal(part, size * ranks[rank] + sum(range(size))) and torch.equal(source, torch.cat(ranks) + rank)
    dist.reduce_scatter(part, [mine(each + rank) for each in ranks])
    assert torch.equal(part, size * ranks[rank] + sum(range(size)))
    exchanged = mine(torch.zeros(SHAPE))
    dist.all_to_all_single(exchanged, mine(ranks[rank]))
    assert torch.equal(exchanged, torch.cat([each[rank : rank + 1] for each in ranks]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["gaps", "transposed", "mixed"])
@every_cluster
def test_every_collective_moves_strided_tensors_by_value(processes: Processes, nodes: list[str], layout: str) -> None:
    processes(4, check_others, layout, nodes=nodes)


def warned_of(rank: int) -> list[str]:
    """What is said of calls of torch's that do not reach what gradwire runs."""
    said = Said()
    logging.getLogger("gradwire").addHandler(said)
    start(rank)
    group = dist.group.WORLD
    assert isinstance(group, DelegatingGroup)
    group.set_timeout(timedelta(seconds=50))
    for name in ("register_pre_hook", "register_post_hook"):  # since torch 2.15
        if hasattr(dist.ProcessGroup, name):
            getattr(group, name)(1, lambda given: None)
    dist.all_reduce(torch.ones(3))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=50)
    dist.destroy_process_group()
    return said.lines


def test_what_does_not_reach_gradwires_own_collectives_is_said(processes: Processes) -> None:
    for first, *hooks in processes(2, warned_of, nodes="ab"):
        assert "`set_timeout`" in first and "give `timeout=` to init_process_group" in first, first
        assert len(hooks) == 2 * hasattr(dist.ProcessGroup, "register_pre_hook")
        assert all("is never called" in each for each in hooks), hooks
