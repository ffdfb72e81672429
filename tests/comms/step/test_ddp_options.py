"""DDP's options for its buckets and for the end of backward change nothing that the hook does."""

import inspect
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes

KNOWN = inspect.signature(DistributedDataParallel).parameters
BUCKETS = [
    name
    for name in ("gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation")  # the last from 2.15 on
    if name in KNOWN
]
BY_HAND = hasattr(DistributedDataParallel, "require_manual_backward_finalization")
"""Whether a script may end backward itself, from torch 2.15 on."""


def trained(options: dict[str, Any], compressor: str, by_hand: bool) -> Tensor:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))
    model: Any = DistributedDataParallel(layers, bucket_cap_mb=0.005, **options)
    state = gradwire.HookState(model, compressor=compressor)
    model.register_comm_hook(state, gradwire.comm_hook)
    if by_hand:
        model.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            rows = torch.randn(
                4, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            )
            if micro == 0:
                with model.no_sync():
                    model(rows).square().mean().backward()
            else:
                model(rows).square().mean().backward()
        if by_hand:
            model.finalize_backward()
        optimizer.step()
    assert state.report().steps == 3
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def all_combinations(_: int) -> list[str]:
    dist.init_process_group("gloo")
    wrong = []
    for compressor in ("none", "int8"):
        wanted = trained({}, compressor, False)
        for values in product((False, True), repeat=len(BUCKETS)):
            options = dict(zip(BUCKETS, values, strict=True))
            for by_hand in (False, True) if BY_HAND else (False,):
                if not torch.equal(trained(options, compressor, by_hand), wanted):
                    wrong.append(f"{compressor} {options} by hand: {by_hand}")
    dist.destroy_process_group()
    return wrong


def test_options_of_buckets_and_of_the_end_of_backward_change_no_bit(processes: Processes) -> None:
    assert processes(2, all_combinations, nodes="ab") == [[], []]


class Branches(nn.Module):
    """A layer that ranks use in some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.spare, self.outside = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 8)

    def forward(self, rows: Tensor, spare: bool) -> Tensor:
        hidden = torch.relu(self.inside(rows))
        return self.outside(hidden + self.spare(hidden) if spare else hidden)  # type: ignore[no-any-return]


USERS = ((0, 1), (0,), (), (1,), (), (0, 1))
"""Step -> the ranks that use the layer."""


def branched(compressor: str, end: str, **options: Any) -> Tensor:
    """The parameters after steps that end automatically, `late` behind backward, or `inside` of it if DDP lets them."""
    model: Any = DistributedDataParallel(Branches(), bucket_cap_mb=0.005, find_unused_parameters=True, **options)
    state = gradwire.HookState(model, compressor=compressor)
    model.register_comm_hook(state, gradwire.comm_hook)
    if end != "automatic":
        model.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, users in enumerate(USERS):
        optimizer.zero_grad()
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(rows, dist.get_rank() in users).square().mean()
        inside = end == "inside" and not model.should_finalize_after_backward
        if inside:  # before gradwire queues a call for the end of backward
            call = partial(torch.autograd.Variable._execution_engine.queue_callback, model.finalize_backward)
            loss.register_hook(lambda _, call=call: call())
        loss.backward()
        if end != "automatic" and not inside:
            model.finalize_backward()
        optimizer.step()
    assert state.report().steps == len(USERS)
    state.close()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def residuals_of_unused_parameters(_: int) -> list[str]:
    dist.init_process_group("gloo")
    wrong = []
    for compressor, views in product(("none", "int8", "waterfill4", "powersgd"), (False, True)):
        wanted = branched(compressor, "automatic", gradient_as_bucket_view=views)
        for end, lazy in product(("late", "inside"), (False, True)):
            found = branched(compressor, end, gradient_as_bucket_view=views, lazy_bucket_allocation=lazy)
            there = [torch.empty_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(there, found)
            if not torch.equal(found, wanted) or not torch.equal(*there):
                wrong.append(f"{compressor} {end} views: {views}, lazy: {lazy}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.skipif(not BY_HAND, reason="DDP has no manual finalization before 2.15")
def test_averages_that_ddp_ignores_are_told_from_others_wherever_backward_ends(processes: Processes) -> None:
    """DDP takes the averages where the script ends backward: before that all gradients look ignored."""
    assert processes(2, residuals_of_unused_parameters, nodes="ab", seconds=200) == [[], []]
