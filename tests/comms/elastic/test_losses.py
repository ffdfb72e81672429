"""Ranks are killed in the middle of training and others join: all have the same weights, and nothing is left behind."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.elastic.membership import View
from support.processes import Processes

STEPS = 12
NODES = ["a", "a", "b", "b"]


def train(rank: int, killed: dict[int, tuple[int, float]], joins: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and dies so many seconds after the beginning of a step where told so; `joins` come from outside."""

    if rank in joins:
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        os.environ |= {"GRADWIRE_JOIN": store}
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) - len(joins))
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 1)), bucket_cap_mb=0.01
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if "compressor" in options else 0.9)
    changes: list[tuple[View, View]] = []
    state = gradwire.HookState(
        model, elastic=True, carries=[optimizer], on_change=lambda *views: changes.append(views), **options
    )
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(rank)
    step, after = killed.get(rank, (STEPS, 0.0))
    before = resources()
    while state.steps < STEPS or state.view.size < len(NODES) - len(killed) + len(joins):
        if state.steps == 3:
            before = resources()
        if state.steps == step:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    digest = torch.cat([value.detach().flatten() for value in model.parameters()])
    saved = state.gathered_state_dict(on_all_ranks=True)
    grown = {name: count - before[name] for name, count in resources().items()}
    state.close()
    return {
        "digest": digest,
        "steps": state.steps,
        "changes": [(old.size, new.size) for old, new in changes],
        "grown": grown,
        "saved": sorted(saved),
    }


def resources() -> dict[str, int]:
    return {"threads": threading.active_count(), "descriptors": len(list(Path("/proc/self/fd").iterdir()))}


@pytest.mark.parametrize("compressor", ["none", "onebit"])
def test_lost_ranks_are_replaced(processes: Processes, compressor: str) -> None:
    options: dict[str, Any] = {"compressor": compressor}
    if compressor == "onebit":  # the elements' units are in use when ranks are lost and join
        options["compressor_options"] = {"warmup_steps": 3}
    found = processes(5, train, {1: (5, 0.003)}, [4], options, nodes=[*NODES, "a"], lost=[1])
    found.remove(None)
    first = found[0]
    assert all(torch.equal(other["digest"], first["digest"]) for other in found)
    assert all(each["steps"] == first["steps"] >= STEPS for each in found)
    assert all(each["changes"][-1][1] == 4 for each in found[:3])
    assert all(len(each["saved"]) == (0 if compressor == "none" else 5) for each in found)


def test_a_lost_node_leaves_nothing_behind(processes: Processes) -> None:
    found = processes(4, train, {2: (5, 0.0), 3: (5, 0.001)}, [], {}, nodes=NODES, lost=[2, 3])
    assert torch.equal(found[0]["digest"], found[1]["digest"])
    for each in found[:2]:
        assert each["steps"] == STEPS
        assert each["changes"][-1][1] == 2
        assert all(count <= 0 for count in each["grown"].values()), each["grown"]
