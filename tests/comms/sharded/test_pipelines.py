"""Stages of a pipeline that FSDP2 shards or replicates: its schedule ends backward, and gradwire's step ends there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import gradwire.fsdp
from gradwire.fsdp import FsdpState
from support.processes import Processes
from support.sharded import differs, error_of, job, weights

WIDTH, MICRO_BATCHES, STEPS = 64, 4, 3
SCHEDULES: dict[type[Any], int] = {Schedule1F1B: 1, ScheduleInterleaved1F1B: 2}
"""Schedule -> stages of each rank."""


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def loss(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


def trained(
    mesh: DeviceMesh, schedule: type[Any], kind: Callable[..., Any], apply: Callable[[nn.Module], FsdpState] | None
) -> dict[str, Tensor]:
    """This rank's weights after some steps; with gradwire if `apply` is given."""
    pipeline, size, place = mesh["pipeline"], mesh["pipeline"].size(), mesh["pipeline"].get_local_rank()
    numbers = [place + size * turn for turn in range(SCHEDULES[schedule])]
    modules = [stage(number) for number in numbers]
    for module in modules:
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                kind(layer, mesh=mesh["data"])
        kind(module, mesh=mesh["data"])
    states = [] if apply is None else [apply(module) for module in modules]
    count = size * len(numbers)
    group, device = pipeline.get_group(), torch.device("cpu")
    stages = [
        PipelineStage(each, number, count, device, group=group) for number, each in zip(numbers, modules, strict=True)
    ]
    run = schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + mesh["data"].get_local_rank())
        rows, wanted = (torch.randn(2 * MICRO_BATCHES, WIDTH, generator=generator) for _ in range(2))
        given = [rows] if numbers[0] == 0 else []
        run.step(*given, **({"target": wanted} if numbers[-1] == count - 1 else {}))
        optimizer.step()
    found = {
        f"{number}.{name}": value
        for number, each in zip(numbers, modules, strict=True)
        for name, value in weights(each).items()
    }
    for state in states:
        assert kind is fully_shard or state.steps == STEPS
        state.close()
    return found


def pipelines(rank: int) -> None:
    with job():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
        for schedule in SCHEDULES:
            for kind, option, few in (replicate, "compressor", "int8"), (fully_shard, "shards", "int8"):
                native = trained(mesh, schedule, kind, None)
                exact = trained(mesh, schedule, kind, gradwire.fsdp.apply)
                assert not differs(exact, native), (schedule, kind)
                options: dict[str, Any] = {option: few}
                found = trained(mesh, schedule, kind, partial(gradwire.fsdp.apply, **options))
                assert 1e-7 < error_of(found, native) < 0.01, (schedule, kind)


def test_a_pipelines_stages_train_as_with_torch_alone(processes: Processes) -> None:
    processes(4, pipelines, nodes="abab")
