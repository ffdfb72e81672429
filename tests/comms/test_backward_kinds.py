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


class Blocks(nn.Module):
    """Linear layers, some of which are computed again in backward by a backward pass of their own."""

    def __init__(self, again: tuple[bool, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in again)
        self.again = again

    def forward(self, inputs: Tensor) -> Tensor:
        for block, again in zip(self.blocks, self.again, strict=True):
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
