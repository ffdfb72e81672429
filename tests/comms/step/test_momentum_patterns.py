"""Patterns of training under DGC, which keeps the optimizer's momentum: plain DDP with a momentum takes the same way.

Everything is sent (density 1), so that the weights are equal to rounding.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes

MOMENTUM, STEPS, SKIPPED = 0.9, 8, 4
PATTERNS = ("one pass", "zeros", "no_sync", "two optimizers", "unused", "loss scale", "skipped step")


def weights(pattern: str, folded: float | None) -> Tensor:
    """The weights after some steps of a pattern, with this momentum in DGC; None is plain DDP with one of its own."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    layers.forward = lambda x, used: sum(torch.tanh(layer(x)) for layer, use in zip(layers, used, strict=True) if use)
    model = DistributedDataParallel(layers, find_unused_parameters=pattern == "unused")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=pattern in ("loss scale", "skipped step"))
    if folded is not None:
        options = {"momentum": folded, "density": 1.0}
        state = gradwire.HookState(model, compressor="dgc", compressor_options=options)
        model.register_comm_hook(state, gradwire.comm_hook)
        if scaler.is_enabled():
            state.watch(scaler)
    parted = [layers[:1], layers[1:]] if pattern == "two optimizers" else [layers]
    momentum = MOMENTUM if folded is None else 0.0
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=momentum) for part in parted]
    batches = torch.Generator().manual_seed(dist.get_rank())

    def backward(step: int) -> None:
        batch = torch.randn(4, 16, generator=batches)
        used = (True, True, step % 3 != 1 or pattern != "unused")
        loss = model(batch, used).square().mean()
        scaler.scale(loss * torch.inf if pattern == "skipped step" and step == SKIPPED else loss).backward()

    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad(set_to_none=pattern != "zeros")
        if pattern == "no_sync":
            with model.no_sync():
                backward(step)
        backward(step)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
    return torch.cat([each.detach().flatten() for each in layers.parameters()])


def differences(rank: int) -> dict[str, list[float]]:
    """Pattern -> the largest difference from plain DDP's weights with DGC's momentum, and without one."""
    dist.init_process_group("gloo")
    found = {}
    for pattern in PATTERNS:
        plain = weights(pattern, None)
        found[pattern] = [float((weights(pattern, folded) - plain).abs().max()) for folded in (MOMENTUM, 0.0)]
    return found


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_the_momentum_in_dgc_moves_as_the_optimizers_own(nodes: str, processes: Processes) -> None:
    """On one node, too, where nothing crosses between nodes: an exact average would lack the momentum."""
    for found in processes(2, differences, nodes=nodes):
        for pattern, (folded, missing) in found.items():
            assert folded < 1e-5, pattern
            assert missing > 1e-3, pattern
