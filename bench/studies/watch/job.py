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
"""Number of micro-batches of a step of the pipeline, which has a layer on each rank."""
FAULT_STEP = 8
"""The first step with the fault."""
FAULT_AT = "the fault begins at"
"""Text that the faulty rank prints before the time at which the fault begins."""

STEP_SECONDS, DELAY_SECONDS = 0.05, 0.2
TIMEOUT = timedelta(seconds=30)
"""Timeout of collectives, after which ranks that disagree fail; a watch reports long before."""

KINDS = ("ddp", "fsdp", "hsdp", "tensor_parallel", "zero1", "own", "pipeline")
FAULTS = ("none", "skip", "order", "shape", "dtype")
WATCHED_SECONDS = 100.0
"""Longest wait until the watches of all ranks run, on a busy machine."""

STEPS_TO_NAME = 20
STEPS_BETWEEN = 40
"""Steps without a delay after those with one: about four of the slices that a watch judges."""


def training(kind: str) -> Callable[[], None]:
    """Builds a small model with a kind of parallelism, and returns a function that trains it for one step.

    Args:
        kind: Kind of parallelism, one of `KINDS`.
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
    """Builds a pipeline with torch's 1F1B schedule, and returns a function that trains it for one step."""
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
    """Averages the gradients in place with one all-reduce a parameter, as a script without DDP would."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def wait_until_watched() -> None:
    """Waits until the watches of all ranks run, because before that none can name a rank.

    Raises:
        RuntimeError: Some do not run after `WATCHED_SECONDS`.
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
    """Runs a collective in which the faulty rank does something else.

    Args:
        fault: Kind of disagreement, one of `FAULTS`.
        faulty: True on the rank that disagrees.
    """
    if fault == "skip" and faulty:
        return
    if fault == "order" and faulty:
        dist.broadcast(torch.ones(3), 0)
    dtype = torch.float64 if fault == "dtype" and faulty else torch.float32
    dist.all_reduce(torch.ones(4 if fault == "shape" and faulty else 3, dtype=dtype))
    if fault == "order" and not faulty:
        dist.broadcast(torch.ones(3), 0)


class EndsWhereSaid(logging.StreamHandler[TextIO]):
    """Prints the watch's log, and ends this rank by SIGTERM once a disagreement is reported, before the timeout."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record, and ends the process if it reports a disagreement."""
        super().emit(record)
        if "disagree in collective" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


def train(fault: str, rank: int, steps: int, step_seconds: float = STEP_SECONDS) -> None:
    """Trains with DDP for some steps.

    Args:
        fault: Kind of disagreement, one of `FAULTS`; it begins in step `FAULT_STEP`.
        rank: Rank that disagrees.
        steps: Number of steps.
        step_seconds: Seconds that each rank sleeps in a step, besides training the model.
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
    """Describes a rank that the watch named as late.

    Attributes:
        rank: Number of the rank.
        busy_with: Activity that made it late, in the watch's words; None if the watch gave no reason.
    """

    rank: int
    busy_with: str | None = None


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """Describes a delay of `STEPS_TO_NAME` steps, and the ranks that the watch named.

    Attributes:
        rank: Number of the delayed rank.
        named: Ranks named during these steps.
        after: Ranks named in the steps without a delay that follow.
    """

    rank: int
    named: tuple[NamedRank, ...]
    after: tuple[NamedRank, ...]


def named_since(count: int) -> tuple[NamedRank, ...]:
    """Returns the ranks that this process's watch named after the first `count`; none on ranks that do not judge."""
    report = gradwire.watch().report
    return tuple(NamedRank(each.late.rank, each.late.busy_with) for each in report.late[count:]) if report else ()


def delays(kind: str, ranks: Sequence[int]) -> list[InjectedDelay]:
    """Trains while one rank after another is late, with steps without a late rank between.

    Args:
        kind: Kind of parallelism, one of `KINDS`.
        ranks: Ranks to delay, in this order.

    Returns:
        Ranks that the watch named for each delay, on rank 0; an empty list on other ranks.
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
