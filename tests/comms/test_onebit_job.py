"""1-bit optimizers in a real job: no group, torch's default one or a part of it, the same weights on all its ranks."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from support.processes import Processes

STEPS, FREEZE = 12, 4


def train(rank: int, make: Callable[..., torch.optim.Optimizer], group: dist.ProcessGroup | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = make(model.parameters(), group, freeze_step=FREEZE, lr=0.01)
    truth = torch.randn(20, 1)
    losses = []
    for _ in range(STEPS):
        rows = torch.randn(64, 20, generator=torch.Generator().manual_seed(rank))
        loss = (model(rows) - rows @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return [float(weights.detach().double().sum()) for weights in model.parameters()]


def check(rank: int, name: str) -> tuple[list[float], list[float] | None]:
    dist.init_process_group("gloo")
    part = dist.new_group([0, 2])
    make = getattr(gradwire, name)
    everybody = train(rank, make, None)
    some = train(rank, make, part) if rank in (0, 2) else None
    dist.barrier()
    dist.destroy_process_group()
    return everybody, some


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb"])
def test_all_ranks_of_the_group_end_with_the_same_weights(processes: Processes, name: str) -> None:
    results = cast(list[tuple[list[float], list[float] | None]], processes(3, check, name))
    everybody = [whole for whole, _ in results]
    some = [part for _, part in results if part]
    assert everybody == [everybody[0]] * 3
    assert some == [some[0]] * 2
    assert some[0] != everybody[0]


def test_without_a_group_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"`group` is None .* call dist\.init_process_group\(\)"):
        gradwire.OneBitAdam([nn.Parameter(Tensor([1.0]))], freeze_step=1)
