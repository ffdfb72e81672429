"""A state that was loaded before the ranks had connected is not dropped if it is refused then.

One rank, whose buckets are compressed all the same (plan="flat").
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.checkpoint import Checkpoint, pack

pytestmark = pytest.mark.usefixtures("alone")


def of_other_ranks() -> Checkpoint:
    return pack({"gradwire/loss_scale": 0.0, "0|compressor": "int8"}, 0, 2, True)


def of_another_compressor() -> Checkpoint:
    model = DistributedDataParallel(nn.Linear(16, 16))
    state = gradwire.HookState(model, plan="flat", compressor="int4")
    model.register_comm_hook(state, gradwire.comm_hook)
    backward(model)
    return state.state_dict()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 16)).square().mean().backward()


@pytest.mark.parametrize("saved", [of_other_ranks, of_another_compressor])
@pytest.mark.parametrize("binds", [False, True])
def test_every_step_refuses_until_a_state_that_fits_is_loaded(saved: object, binds: bool) -> None:
    assert callable(saved)
    found = saved()
    model = DistributedDataParallel(nn.Linear(16, 16))
    state = gradwire.HookState(plan="flat", compressor="int8")
    fits = state.state_dict()
    state.load_state_dict(found)
    if binds:
        with pytest.raises(ValueError, match="`state"):
            state.bind(model)

    def train() -> None:
        """One step of the model, wrapped anew: after an error in backward torch's DDP refuses another one."""
        model = DistributedDataParallel(nn.Linear(16, 16))
        model.register_comm_hook(state, gradwire.comm_hook)
        backward(model)

    for _ in range(2):
        with pytest.raises(ValueError, match="`state"):
            train()
        assert state.steps == 0
        assert state.state_dict() == found  # a checkpoint that is written now loses nothing
    if not binds:
        state.load_state_dict(fits)
        train()
        assert state.steps == 1
    state.close()
