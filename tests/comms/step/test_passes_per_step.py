"""Optimizers that average several passes per step are refused if the compressor keeps their momentum, and only then.

One rank, whose buckets are compressed all the same (plan="flat").
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.step.passes_per_step import MOST_STEPS


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(torch.ones(2, 16)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The two passes of SAM, whose first gradient only moves the weights for a moment."""
    backward(model, optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            each.add_(each.grad, alpha=0.01)
    backward(model, optimizer)
    with torch.no_grad():
        for each, old in zip(model.parameters(), before, strict=True):
            each.copy_(old)
    optimizer.step()


def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: float(backward(model, optimizer)))


def train(
    step: Step, steps: int, compressor: str = "onebit", momentum: float = 0.9, kind: type[Any] = torch.optim.SGD
) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16, bias=False))
    options: dict[str, Any] = {"momentum": momentum} if compressor in ("onebit", "dgc") else {}
    state = gradwire.HookState(model, plan="flat", compressor=compressor, compressor_options=options)
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    state.close()


@pytest.mark.parametrize("compressor", ["onebit", "dgc"])
def test_the_two_passes_of_sam_are_refused_with_the_line_to_write(compressor: str) -> None:
    train(sharpness_aware, MOST_STEPS, compressor)
    with pytest.raises(RuntimeError, match=rf"(?s){compressor}.*compressor_options=\{{\"momentum\": 0\.0\}}"):
        train(sharpness_aware, MOST_STEPS + 1, compressor)


def test_the_closure_of_lbfgs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="LBFGS or a closure that is called repeatedly"):
        train(closure, MOST_STEPS + 1, kind=torch.optim.LBFGS)


@pytest.mark.parametrize(("compressor", "momentum"), [("onebit", 0.0), ("int8", 0.0)])
def test_without_a_momentum_they_are_right(compressor: str, momentum: float) -> None:
    train(sharpness_aware, MOST_STEPS + 2, compressor, momentum)


def test_one_pass_a_step_is_never_refused_nor_are_single_passes_without_one() -> None:
    train(one_pass, MOST_STEPS + 3)
    numbers = iter(range(100))

    def skips_some(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, optimizer)
        if next(numbers) % 3 != 1:
            optimizer.step()

    train(skips_some, 12)


def test_two_optimizers_of_one_model_take_one_step_together() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    state = gradwire.HookState(model, plan="flat", compressor="onebit", compressor_options={"momentum": 0.9})
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in model.module]
    for _ in range(MOST_STEPS):
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
        for each in optimizers:
            each.step()
    with pytest.raises(RuntimeError, match="several averaged backward passes"):
        model(torch.ones(2, 16)).square().mean().backward()
    state.close()
