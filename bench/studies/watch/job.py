"""One rank of a small training in which one rank is late, or disagrees: the job of `injected`."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import store_of
from gradwire.comms.watch.watch_store import WatchStore

WIDTH, LAYERS, BATCH = 32, 4, 8
MICRO_BATCHES = 4
"""Of a step of the pipeline, which has a layer on each rank."""
FAULT_STEP = 8
"""The first step with the fault."""
FAULT_AT = "the fault begins at"
"""What the faulty rank prints, with the time."""

STEP_SECONDS, DELAY_SECONDS = 0.05, 0.2
TIMEOUT = timedelta(seconds=30)
"""After which ranks that disagree give up; a watch has spoken long before."""

KINDS = ("ddp", "fsdp", "hsdp", "tensor_parallel", "zero1", "own", "pipeline")
FAULTS = ("none", "skip", "order", "shape", "dtype")
WATCHED_SECONDS = 100.0
"""For the watches of all ranks to look, on a busy machine."""

STEPS_TO_NAME = 20
STEPS_BETWEEN = 40
"""Without a delay, after one with it: some four of the slices in which a watch judges."""


def training(kind: str) -> Callable[[], None]:
    """What a step computes and sends, in the kind of parallelism that is asked for.

    Args:
        kind: One of `KINDS`.
    """
    torch.manual_seed(0)
    if kind == "pipeline":
        return _pipeline()
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
    optimizer: torch.optim.Optimizer
    if kind == "zero1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        if kind == "own":
            average_by_hand(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pipeline() -> Callable[[], None]:
    """Torch's own 1F1B schedule, over point-to-point messages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(torch.nn.Linear(WIDTH, WIDTH), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.ones(BATCH, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()

    return step


def average_by_hand(model: torch.nn.Module) -> None:
    """What a script does that knows no DDP."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def wait_until_watched() -> None:
    """Waits until the watches of all ranks look: in a job's first moments, before that, none can name anything.

    Raises:
        RuntimeError: They do not come.
    """
    group = dist.group.WORLD
    assert group is not None
    store = WatchStore(store_of(group), dist.get_rank(), dist.get_world_size())
    until = time.monotonic() + WATCHED_SECONDS
    while len(store.statuses()) < dist.get_world_size():
        if time.monotonic() > until:
            raise RuntimeError(f"only the ranks {sorted(store.statuses())} are watched after {WATCHED_SECONDS:.0f} s")
        time.sleep(STEP_SECONDS)


def disagree(fault: str, faulty: bool) -> None:
    """A collective of the script's own, in which the faulty rank does something else."""
    if fault == "skip" and faulty:
        return
    if fault == "order" and faulty:
        dist.broadcast(torch.ones(3), 0)
    dtype = torch.float64 if fault == "dtype" and faulty else torch.float32
    dist.all_reduce(torch.ones(4 if fault == "shape" and faulty else 3, dtype=dtype))
    if fault == "order" and not faulty:
        dist.broadcast(torch.ones(3), 0)


class EndsWhereSaid(logging.StreamHandler[TextIO]):
    """Prints what the watch logs, and ends this rank once it has said who disagrees, in place of the time-out."""

    def emit(self, record: logging.LogRecord) -> None:
        """Takes in what the watch logs."""
        super().emit(record)
        if "disagree in collective" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


def train(fault: str, rank: int, steps: int, step_seconds: float = STEP_SECONDS) -> None:
    """Trains with DDP for some steps.

    Args:
        fault: One of `FAULTS`.
        rank: Which rank has it.
        steps: How many.
        step_seconds: What each rank computes in a step, besides the model.
    """
    train_step = training("ddp")
    for step in range(steps):
        time.sleep(step_seconds)
        train_step()
        if fault != "none" and step >= FAULT_STEP:
            faulty = dist.get_rank() == rank and step == FAULT_STEP
            if step == FAULT_STEP:
                wait_until_watched()
                logging.getLogger("gradwire").addHandler(EndsWhereSaid())
            if faulty:
                print(f"{FAULT_AT} {time.time()}", flush=True)
            disagree(fault, faulty)


@dataclass(frozen=True, slots=True)
class NamedRank:
    """A rank that the watch has called late.

    Attributes:
        rank: Which.
        busy_with: What it was late in, in the watch's words; None where it gave no reason.
    """

    rank: int
    busy_with: str | None = None


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """A rank that was late for `STEPS_TO_NAME` steps, and what the watch said.

    Attributes:
        rank: Which.
        named: The ranks that it has named in these steps.
        after: Those that it has named in the steps without a delay behind them.
    """

    rank: int
    named: tuple[NamedRank, ...]
    after: tuple[NamedRank, ...]


def named_since(count: int) -> tuple[NamedRank, ...]:
    """Whom this process's watch has named after so many; nobody on ranks that do not judge."""
    report = gradwire.watch().report
    return tuple(NamedRank(each.late.rank, each.late.busy_with) for each in report.late[count:]) if report else ()


def delays(kind: str, ranks: Sequence[int]) -> list[InjectedDelay]:
    """Has one rank after the other come late, with steps between in which nobody does.

    Args:
        kind: Of the job.
        ranks: Who is late, in turn.

    Returns:
        What the watch said of each; on rank 0 alone, empty elsewhere.
    """
    train_step, here = training(kind), dist.get_rank()

    def go(steps: int, late: int | None) -> tuple[NamedRank, ...]:
        before = len(named_since(0))
        for _ in range(steps):
            time.sleep(STEP_SECONDS + (DELAY_SECONDS if here == late else 0.0))
            train_step()
        return named_since(before)

    go(STEPS_BETWEEN, None)
    found = [InjectedDelay(rank, go(STEPS_TO_NAME, rank), go(STEPS_BETWEEN, None)) for rank in ranks]
    return found if here == 0 else []
