"""Optimizers that average several passes per step are refused if the compressor keeps their momentum, and only then.

One rank, whose buckets are compressed all the same (plan="flat").
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.fsdp
from gradwire.comms.sharded.state import FsdpState
from gradwire.comms.step.passes_per_step import MOST_STEPS

pytestmark = pytest.mark.usefixtures("alone")


Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(torch.ones(2, 16)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()


Perturb = Callable[[Tensor, Tensor], object]


def sharpness_aware(
    model: nn.Module, optimizer: torch.optim.Optimizer, perturb: Perturb = lambda each, by: each.add_(by)
) -> None:
    """The two passes of SAM, whose first gradient only moves the weights for a moment."""
    backward(model, optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            perturb(each, 0.01 * each.grad)
    backward(model, optimizer)
    with torch.no_grad():
        for each, old in zip(model.parameters(), before, strict=True):
            each.copy_(old)
    optimizer.step()


def behind_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """SAM in the way that autograd does not count as a change of the weights."""
    sharpness_aware(model, optimizer, lambda each, by: each.data.add_(by))


def with_other_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sharpness_aware(model, optimizer, lambda each, by: setattr(each, "data", each.data + by))


def unseen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The gradient of the first pass is thrown away."""
    backward(model, optimizer)
    backward(model, optimizer)
    optimizer.step()


class Sam(torch.optim.SGD):
    """SAM as an optimizer with a closure, around another optimizer of the same parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            for each in parameters:
                each.add_(each.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        torch.optim.SGD(parameters, lr=0.01).step()


def closure_of_sam(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step(lambda: float(backward(model, optimizer)))


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
@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (sharpness_aware, torch.optim.SGD),
        (behind_autograd, torch.optim.SGD),
        (with_other_data, torch.optim.SGD),
        (closure_of_sam, Sam),
        (closure, torch.optim.LBFGS),
    ],
    ids=["sam", "sam behind autograd", "sam with other data", "closure of sam", "lbfgs"],
)
def test_several_passes_are_refused_before_a_step_uses_them(step: Step, kind: type[Any], compressor: str) -> None:
    taken: list[Tensor] = []

    def noted(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        taken.append(next(model.parameters()).detach().clone())
        step(model, optimizer)
        taken.append(next(model.parameters()).detach().clone())

    with pytest.raises(
        RuntimeError,
        match=rf"(?s)weights have changed between two .*SAM, LBFGS or a closure .*{compressor}.*"
        r"compressor_options=\{\"momentum\": 0\.0\}",
    ):
        train(noted, 1, compressor, kind=kind)
    assert len(taken) == 1


def test_every_later_pass_is_refused_too() -> None:
    refused = []

    def caught(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(RuntimeError, match="SAM") as found:
            sharpness_aware(model, optimizer)
        refused.append(found)

    train(caught, 2)
    assert len(refused) == 2


def test_passes_between_which_no_change_is_seen_are_refused_after_a_few_steps() -> None:
    train(unseen, MOST_STEPS)
    with pytest.raises(RuntimeError, match=f"each of the last {MOST_STEPS} steps of an optimizer .*LBFGS or a closure"):
        train(unseen, MOST_STEPS + 1)


def sharded(kind: str) -> tuple[Any, torch.optim.Optimizer, FsdpState]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for each in (*model, model):
        replicate(each, mesh=mesh["replicate"]) if kind == "replicate" else fully_shard(each, mesh=mesh["shard"])
    state = gradwire.fsdp.apply(model, replicas=mesh["replicate"], compressor="dgc", plan="flat")
    return model, torch.optim.SGD(model.parameters(), lr=0.01), state


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_passes_of_a_sharded_model_are_counted_too(kind: str) -> None:
    def accumulates(model: Any, optimizer: torch.optim.Optimizer, *, sync: bool) -> None:
        for micro in range(3):
            model.set_requires_gradient_sync(sync or micro == 2)
            model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def takes(step: Callable[..., None], steps: int, **options: bool) -> None:
        model, optimizer, state = sharded(kind)
        for _ in range(steps):
            step(model, optimizer, **options)
        state.close()

    takes(one_pass, MOST_STEPS + 3)
    takes(accumulates, MOST_STEPS + 3, sync=False)
    takes(accumulates, MOST_STEPS, sync=True)
    with pytest.raises(RuntimeError, match=rf"last {MOST_STEPS} steps .*set_requires_gradient_sync\(False\)"):
        takes(accumulates, MOST_STEPS + 1, sync=True)
    with pytest.raises(RuntimeError, match="weights have changed between two"):
        takes(sharpness_aware, 1)


def test_weights_that_are_clipped_or_exchanged_between_steps_are_none_of_it() -> None:
    steps = iter(range(100))

    def exchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        number = next(steps)
        backward(model, optimizer)
        if number == 5:  # a step is skipped, and a test is run with other weights
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(1.0)
            return
        optimizer.step()
        with torch.no_grad():
            for each in model.parameters():
                each.clamp_(-0.5, 0.5)

    train(exchanged, 12)


def test_an_optimizer_that_torch_does_not_know_is_none_of_it() -> None:
    def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, optimizer)
        with torch.no_grad():
            for each in model.parameters():
                assert each.grad is not None
                each.sub_(each.grad, alpha=0.01)

    train(by_hand, MOST_STEPS + 3)


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


def test_optimizers_that_step_in_turn_are_refused_after_a_few_steps() -> None:
    """Each one's momentum would decay in the passes of the other one, too."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    state = gradwire.HookState(model, plan="flat", compressor="onebit", compressor_options={"momentum": 0.9})
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in model.module]
    with pytest.raises(RuntimeError, match="several averaged backward passes"):
        for number in range(2 * MOST_STEPS + 2):
            one_pass(model, optimizers[number % 2])
            model.zero_grad()
    assert number == 2 * MOST_STEPS + 1
    state.close()
