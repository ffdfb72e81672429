"""Law: ranks of an elastic job go on from one moment, too; who joins has loaded nothing, and may be lost as ever."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from support.processes import Processes

OTHER = r"^`state.* is .* on rank 1 and .* on rank 0; .* moment"


def start() -> tuple[DistributedDataParallel, gradwire.HookState]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = gradwire.HookState(model, elastic=True, extra_state=[optimizer], compressor="waterfill4")
    model.register_comm_hook(state, gradwire.comm_hook)
    return model, state


def step(model: DistributedDataParallel, state: gradwire.HookState) -> None:
    model.zero_grad()
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * state.steps + dist.get_rank()))
    model(rows).square().mean().backward()


def gradients(model: DistributedDataParallel) -> torch.Tensor:
    return torch.cat([each.grad.view(-1) for each in model.parameters() if each.grad is not None])


def load_other_moments(rank: int) -> None:
    """Rank 1 alone loads nothing, or an older state; at the start, and behind some steps."""
    dist.init_process_group("gloo")
    model, state = start()
    saved: list[Any] = [None]
    for _ in range(2):
        step(model, state)
        saved.append(state.state_dict())
    step(model, state)
    expected = gradients(model)
    state.close()
    for older, trained in ((0, 0), (1, 0), (1, 1)):
        model, state = start()
        for _ in range(trained):
            step(model, state)
        if (own := saved[older if rank == 1 else -1]) is not None:
            state.load_state_dict(own)
        with pytest.raises(ValueError, match=OTHER):
            step(model, state)
        dist.barrier()  # who hears first must not be taken for lost by who has not heard yet
        state.close()
    model, state = start()
    state.steps = 2  # of the batches
    state.load_state_dict(saved[-1])
    step(model, state)
    assert torch.equal(gradients(model), expected)
    state.close()
    dist.barrier()


def test_a_rank_that_loads_another_state_is_named(processes: Processes) -> None:
    processes(2, load_other_moments, nodes=["a", "b"])


def lose_one_that_compares(rank: int) -> tuple[int, bytes]:
    """Rank 2 has loaded another state, and ends while the ranks find out which."""
    dist.init_process_group("gloo")
    model, state = start()
    step(model, state)
    older = state.state_dict()
    step(model, state)
    state.load_state_dict(older if rank == 2 else state.state_dict())
    if rank == 2:
        Agreement.compare = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    for _ in range(2):
        step(model, state)
    found = state.view.size, gradients(model).numpy().tobytes()
    state.close()
    return found


def test_a_rank_that_is_lost_while_they_compare_is_survived(processes: Processes) -> None:
    first, second, _ = processes(3, lose_one_that_compares, nodes=["a", "b", "c"], lost=[2])
    assert first[0] == 2 and first == second


def join(rank: int) -> None:
    """Two ranks go on from a state, a third one joins them, which has loaded nothing; then all load what they saved."""
    if rank == 2:
        os.environ["GRADWIRE_ELASTIC"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        os.environ["WORLD_SIZE"] = "2"
        dist.init_process_group("gloo")
    model, state = start()
    if rank == 2:
        with pytest.raises(ValueError, match="by a process that has just joined a running job"):
            state.load_state_dict(state.state_dict())
        step(model, state)  # that the others are about to make
    else:
        step(model, state)
        state.load_state_dict(state.state_dict())
    while state.view.size < 3:
        step(model, state)
    older = state.gathered_state_dict(on_all_ranks=True)
    step(model, state)
    state.load_state_dict(state.gathered_state_dict(on_all_ranks=True))
    step(model, state)
    if state.view.rank == 1:
        state.load_state_dict(older)
    else:
        state.load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match=OTHER):
        step(model, state)
    dist.barrier(group=model.process_group)
    state.close()


def test_who_joins_has_loaded_nothing_and_compares_what_is_loaded_later(processes: Processes) -> None:
    processes(3, join, nodes=["a", "b", "c"])
