"""One rank of a small training in which one rank is late, or disagrees: the job of `planted`.

torchrun --nproc-per-node 4 -m gradwire.bench.studies.watch.job --kind ddp --fault late --rank 2
"""

import argparse
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 32, 4, 8
FAULT_STEP = 8
"""The first step with the fault."""

STEP_SECONDS, DELAY_SECONDS = 0.05, 0.2
TIMEOUT = timedelta(seconds=30)
"""After which ranks that disagree give up; a watch has spoken long before."""

KINDS = ("ddp", "fsdp", "hsdp", "tensor_parallel", "zero1", "own")
FAULTS = ("none", "late", "skip", "order", "shape")


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model in the kind of parallelism that is asked for, and its optimizer.

    Args:
        kind: One of `KINDS`.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if kind in ("ddp", "zero1"):
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    elif kind in ("fsdp", "hsdp"):
        half = dist.get_world_size() // 2
        mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tensor_parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, ParallelStyle] = {
            str(place): RowwiseParallel() if place % 2 else ColwiseParallel() for place in range(LAYERS)
        }
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    if kind == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def disagree(fault: str, faulty: bool) -> None:
    """A collective of the script's own, in which the faulty rank does something else."""
    if fault == "skip" and faulty:
        return
    if fault == "order" and faulty:
        dist.broadcast(torch.ones(3), 0)
    dist.all_reduce(torch.ones(4 if fault == "shape" and faulty else 3))
    if fault == "order" and not faulty:
        dist.broadcast(torch.ones(3), 0)


def train(kind: str, fault: str, rank: int, steps: int) -> None:
    """Trains for some steps.

    Args:
        kind: One of `KINDS`.
        fault: One of `FAULTS`.
        rank: Which rank has it.
        steps: How many.
    """
    model, optimizer = build(kind)
    faulty = dist.get_rank() == rank
    average: Callable[[], None] = (lambda: average_by_hand(model)) if kind == "own" else lambda: None
    for step in range(steps):
        time.sleep(STEP_SECONDS + (DELAY_SECONDS if fault == "late" and faulty and step >= FAULT_STEP else 0.0))
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
        if fault not in ("none", "late") and step >= FAULT_STEP:
            disagree(fault, faulty and step == FAULT_STEP)


def average_by_hand(model: torch.nn.Module) -> None:
    """What a script does that knows no DDP."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main() -> None:
    """Runs this rank."""
    parser = argparse.ArgumentParser(prog="python -m gradwire.bench.studies.watch.job", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="ddp")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=1, help="the rank that has the fault (default: 1)")
    parser.add_argument("--steps", type=int, default=FAULT_STEP + 20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    train(arguments.kind, arguments.fault, arguments.rank, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
