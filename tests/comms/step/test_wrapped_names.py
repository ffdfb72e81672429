"""Parameters have their names in the model, whatever torch.compile or activation checkpointing has put around it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.names import ParameterNames
from gradwire.comms.outer.workers import trained_parameters
from gradwire.compressors.base import plain_name
from gradwire.compressors.optim.first_step import _uses
from gradwire.compressors.optim.fit import CompressorUse
from gradwire.compressors.rules import Rule
from support.processes import Processes

NAMES = ["body.weight", "body.bias", "head.weight", "head.bias"]


class Model(nn.Module):
    """Two layers."""

    def __init__(self, body: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.body = body(nn.Linear(64, 64))
        self.head = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "compiled model": lambda: compiled(Model()),
    "compiled block": lambda: Model(compiled),
    "checkpointed block": lambda: Model(checkpoint_wrapper),
    "both": lambda: compiled(Model(lambda layer: checkpoint_wrapper(compiled(layer)))),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers_change_no_name(kind: str) -> None:
    model = WRAPPED[kind]()
    names = ParameterNames()
    names.bind(model)
    assert list(names.numels()) == NAMES
    assert [name for name, _ in trained_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])] == NAMES


def test_a_part_that_only_looks_like_a_wrapper_stays() -> None:
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("pattern", ["body.*", "_orig_mod.body.*"])
def test_a_rule_matches_with_and_without_wrappers(kind: str, pattern: str) -> None:
    model, rule, main = WRAPPED[kind](), Rule(pattern=pattern, compressor="int4"), CompressorUse("int8", {}, None)
    uses = _uses(model, main, (rule,))
    assert [uses[id(each)].name for each in model.parameters()] == ["int4", "int4", "int8", "int8"]


def resume(rank: int) -> bool:
    """Trains a wrapped model and goes on without wrappers; returns whether that goes on as without the change."""
    dist.init_process_group("gloo")
    gradients = []
    for wrapped in (True, False):
        torch.manual_seed(1)
        model = Model(checkpoint_wrapper if wrapped else lambda layer: layer)
        saved = None
        for around in ((compiled if wrapped else lambda module: module), lambda module: module):
            ddp = DistributedDataParallel(around(model))
            state = gradwire.HookState(ddp, compressor="int8")
            if saved is not None:
                state.load_state_dict(saved)
            ddp.register_comm_hook(state, gradwire.comm_hook)
            for step in range(3):
                model.zero_grad()
                inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
                ddp(inputs).square().mean().backward()
            saved = state.state_dict()
            state.close()
            if wrapped:
                model.body = model.body._checkpoint_wrapped_module  # type: ignore[assignment]
                wrapped = False
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    dist.destroy_process_group()
    return len(gradients[0]) == 4 and all(map(torch.equal, *gradients))


def test_a_state_goes_on_without_the_wrappers(processes: Processes) -> None:
    assert processes(2, resume, nodes=["a", "b"], seconds=120) == [True, True]
