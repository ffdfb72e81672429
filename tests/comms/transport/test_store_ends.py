"""Jobs that outlive the process which serves their store: buckets need it no more once the hook is registered."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes


def train_after_the_store(rank: int, compressor: str | None, numel: int) -> list[float]:
    """Rank 0 serves the store, waits until the sub-group of the others has bound its model, and exits before a step."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["bound/1", "bound/2"])
        return []
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(numel, 1, bias=False), process_group=group)
    state = gradwire.HookState(model, compressor=compressor)
    model.register_comm_hook(state, gradwire.comm_hook)
    store.set(f"bound/{rank}", "")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # until rank 0 has exited
        try:
            store.get("bound/1")
        except RuntimeError:
            break
        time.sleep(0.05)
    model(torch.full((1, numel), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return [float(gradient[0, 0]), float(gradient[0, -1])]


@pytest.mark.parametrize("compressor", [None, "int8"])
def test_a_sub_group_trains_on_without_the_store(processes: Processes, compressor: str | None) -> None:
    numel = 1 << 18  # a MiB: large enough for gloo's second group
    _, *found = processes(3, train_after_the_store, compressor, numel, nodes="abc", lost=[0])
    for result in found:
        assert result == pytest.approx([1.5, 1.5], rel=0.01)
