"""Law: a step is one backward pass, however DDP and autograd divide it; nothing is held back that DDP waits for."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from support.processes import Processes

STEPS = 3
WIDE = torch.float64


class Blocks(nn.Module):
    """Linear layers, some of which are computed again in backward by a backward pass of their own.

    Of two dtypes DDP has two buckets in the first step already.
    """

    def __init__(self, again: tuple[bool, ...], dtypes: tuple[torch.dtype, torch.dtype] = (WIDE, WIDE)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, dtype=dtypes[index % 2]) for index in range(len(again)))
        self.again = again

    def forward(self, inputs: Tensor) -> Tensor:
        for block, again in zip(self.blocks, self.again, strict=True):
            inputs = inputs.to(next(block.parameters()).dtype)
            inputs = checkpoint(block, inputs, use_reentrant=True) if again else block(inputs)
        return inputs


def train(rank: int, again: tuple[bool, ...], static_graph: bool, options: dict[str, Any]) -> tuple[Tensor, int]:
    """The gradients of the last step, and the steps that the hook has counted."""
    model = DistributedDataParallel(Blocks(again), bucket_cap_mb=0.003, static_graph=static_graph)
    state = gradwire.HookState(model, plan="hierarchical", **options)
    if options.get("compressor"):
        state.load_state_dict(state.state_dict())
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(4, 16, dtype=torch.float64, generator=generator, requires_grad=True)
        model.zero_grad()
        model(inputs).square().sum().backward()
    steps = state.steps
    state.close()
    return torch.cat([weight.grad.view(-1) for weight in model.parameters() if weight.grad is not None]), steps


CASES: dict[str, tuple[tuple[bool, ...], bool, dict[str, Any]]] = {
    "static graph, joined": ((False,) * 4, True, {"fusion": 25}),
    "static graph, a state that was loaded": ((False,) * 4, True, {"compressor": "bf16"}),
    "the first bucket outside a checkpoint": ((True, True, True, False), True, {"fusion": 25}),
    "the first bucket inside a checkpoint": ((False, True, True, True), True, {"fusion": 25}),
    "checkpoints alone": ((True,) * 4, False, {"fusion": 25}),
}


def every_case(rank: int) -> dict[str, tuple[Tensor, int]]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {name: train(rank, *case) for name, case in CASES.items()}
    results["plain"] = train(rank, (False,) * 4, False, {})
    dist.destroy_process_group()
    return results


@pytest.mark.slow
def test_a_step_is_one_backward_pass(processes: Processes) -> None:
    for results in processes(2, every_case, nodes=["one", "two"]):
        plain, steps = results.pop("plain")
        assert steps == STEPS
        for name, (gradients, counted) in results.items():
            assert counted == STEPS, name
            tolerance = 0.02 if "loaded" in name else 1e-12
            torch.testing.assert_close(gradients, plain, rtol=tolerance, atol=tolerance, msg=name)


def of_two_dtypes(rank: int) -> list[tuple[str, int, bool]]:
    """Which model: steps that the hook has counted, and whether the last gradients are those without checkpoints."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found, plain = [], None
    for again in ((False,) * 4, (False, True, True, True)):
        for static_graph, named in ((False, False), (True, True), (True, False)):
            model = DistributedDataParallel(
                Blocks(again, (torch.float32, WIDE)), bucket_cap_mb=0.001, static_graph=static_graph
            )
            state = gradwire.HookState(model if named else None)
            model.register_comm_hook(state, gradwire.comm_hook)
            for step in range(STEPS):
                inputs = torch.ones(4, 16, requires_grad=True) * (rank + step)
                model.zero_grad()
                model(inputs).square().sum().backward()
            gradients = torch.cat([each.grad.view(-1) for each in model.parameters() if each.grad is not None])
            plain = gradients if plain is None else plain
            found.append((f"{again} {static_graph} {named}", state.steps, torch.allclose(gradients, plain)))
            state.close()
    dist.destroy_process_group()
    return found


def test_a_backward_pass_inside_another_one_is_no_step_where_no_bucket_is_known_to_be_the_last(
    processes: Processes,
) -> None:
    """Without a model nobody knows whether DDP will announce it; with static_graph it does from the second step on."""
    for results in processes(2, of_two_dtypes, nodes=["one", "two"]):
        for where, steps, alike in results:
            assert (steps, alike) == (STEPS, True), where


class Branches(nn.Module):
    """Two layers that take turns, as experts or heads do, and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, used: tuple[int, ...]) -> Tensor:
        return torch.stack([self.branches[index](inputs) for index in used]).sum(dim=0)


LOSSY: dict[str, dict[str, Any]] = {
    "int4": {},
    "dgc": {"density": 0.05, "momentum": 0.0, "warmup_steps": 0},
    "powersgd": {"rank": 1, "warmup_steps": 0},
}


def sums_of_branches(rank: int, compressor: str | None, set_to_none: bool, view: bool, given: str) -> list[Tensor]:
    """What the gradients of all steps add up to."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    options: dict[str, Any] = {"compressor": compressor}
    if compressor:
        options["compressor_options"] = LOSSY[compressor]
    made_for = {"model": model, "module": model.module, "nothing": None}[given]
    state = gradwire.HookState(made_for, plan="hierarchical", **options)
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(rank)
    sums = [torch.zeros(64, 64) for _ in range(3)]
    for step in range(8):
        if compressor and step > 5:
            state.flush()
        model.zero_grad(set_to_none=set_to_none)
        used = (0, 1) if step == 7 else (step % 2,)
        model(torch.randn(4, 64, generator=generator), used).square().mean().backward()
        for total, branch in zip(sums, model.module.branches, strict=True):
            if branch.weight.grad is not None:
                total += branch.weight.grad
    state.close()
    return sums


def every_kind(rank: int) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    dist.init_process_group("gloo")
    found = []
    for set_to_none, view in ((True, False), (True, True), (False, False)):
        plain = sums_of_branches(rank, None, set_to_none, view, "model")
        for given in ("model", "module", "nothing"):
            names = LOSSY if given == "model" else ["int4"]
            found += [
                (f"{name} {given}", plain, sums_of_branches(rank, name, set_to_none, view, given)) for name in names
            ]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_is_held_back_of_a_parameter_waits_until_a_rank_uses_it(processes: Processes) -> None:
    """DDP takes no average of a parameter that no rank has used: what was sent of it then would be lost."""
    for results in processes(2, every_kind, nodes=["one", "two"]):
        for name, plain, sums in results:
            torch.testing.assert_close(sums, plain, rtol=1e-4, atol=1e-6, msg=name)
