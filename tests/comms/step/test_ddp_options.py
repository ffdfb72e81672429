"""DDP's options for its buckets and for the end of backward change nothing that the hook does."""

import inspect
from itertools import product
from typing import Any

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
