"""Ranks are killed in the middle of training and others join: all have the same weights, and nothing is left behind."""

import gc
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap import liveness
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.liveness import LivenessRing
from gradwire.comms.communicator import Communicator
from gradwire.comms.elastic.membership import EvictedError, Membership, View
from gradwire.comms.observe.observer import Observer
from gradwire.comms.observe.stall import StallWatch
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.transport.gloo_sockets import connections
from gradwire.comms.transport.groups import Groups
from gradwire.comms.transport.shm import ShmGroup
from gradwire.comms.transport.torch_group import GlooTransport
from support.processes import Processes

STEPS = 12
NODES = ["a", "a", "b", "b"]


def train(
    rank: int,
    killed: dict[int, tuple[int, float]],
    joins: list[int],
    options: dict[str, Any],
    backend: str = "gloo",
    traced: str = "",
) -> dict[str, Any]:
    """Trains, and dies so many seconds after the beginning of a step where told so; `joins` come from outside."""
    if rank in joins:
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        os.environ |= {"GRADWIRE_ELASTIC": store}
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) - len(joins))
        dist.init_process_group(backend)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 1)), bucket_cap_mb=0.01
    )
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if "compressor" in options else 0.9)
    ]
    if options.get("compressor") == "int8":  # several optimizers, and what each of them knows is handed over
        matrices = [each for each in model.parameters() if each.ndim == 2]
        others = [each for each in model.parameters() if each.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    changes: list[tuple[View, View]] = []
    state = gradwire.HookState(
        model,
        elastic=True,
        extra_state=optimizers,
        on_membership_change=lambda *views: changes.append(views),
        **options,
    )
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(rank)
    step, after = killed.get(rank, (-1, 0.0))
    before, first = resources(), state.steps  # who joins makes the step that the others are about to make
    while state.steps in range(first, max(first + 1, STEPS)) or state.view.size < len(NODES) - len(killed) + len(joins):
        if state.steps == 3:
            before = resources()
        if traced and state.steps == STEPS - 3:
            state.trace(traced, steps=2)
        if state.steps == step:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        model.zero_grad()
        model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
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


@pytest.mark.parametrize(
    ("compressor", "plan"), [("none", "auto"), ("onebit", "auto"), ("onebit", "flat"), ("int8", "auto")]
)
def test_lost_ranks_are_replaced(processes: Processes, compressor: str, plan: str) -> None:
    options: dict[str, Any] = {"compressor": compressor, "plan": plan}
    if compressor == "onebit":  # the elements' units are in use when ranks are lost and join
        options["compressor_options"] = {"warmup_steps": 3}
    # with int8 Muon trains the matrices and AdamW the rest
    found = processes(5, train, {1: (5, 0.003)}, [4], options, nodes=[*NODES, "a"], lost=[1])
    found.remove(None)
    first = found[0]
    assert all(torch.equal(other["digest"], first["digest"]) for other in found)
    assert all(each["steps"] == first["steps"] >= STEPS for each in found)
    assert all(each["changes"][-1][1] == 4 for each in found[:3])
    assert all(len(each["saved"]) == (0 if compressor == "none" else 5) for each in found)


def test_a_lost_node_leaves_nothing_behind(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    killed = {2: (5, 0.0), 3: (5, 0.001)}
    found = processes(4, train, killed, [], {}, "gradwire", str(file), nodes=NODES, lost=[2, 3])
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"].startswith("bucket")} == {0, 1}
    assert torch.equal(found[0]["digest"], found[1]["digest"])
    for each in found[:2]:
        assert each["steps"] == STEPS
        assert each["changes"][-1][1] == 2
        assert all(count <= 0 for count in each["grown"].values()), each["grown"]


def decides(rank: int) -> tuple[int, bytes]:
    """Trains while a rank is lost that the others wait for in a decision about cuts; ranks left, and the weights."""
    dist.init_process_group("gloo")
    inner = Agreement.decide

    def decide(voice: Agreement, value: object, rule: Callable[[list[object]], object]) -> object:
        if rank == 3 and voice._name.startswith("tune"):
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(voice, value, rule)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    with patch.object(Agreement, "decide", decide):
        state = gradwire.HookState(model, elastic=True, fusion="auto")
        model.register_comm_hook(state, gradwire.comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while state.steps < STEPS or state.view.size == 4:
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    size = state.view.size
    state.close()
    return size, b"".join(value.detach().numpy().tobytes() for value in model.parameters())


def test_a_rank_that_is_lost_in_a_decision_about_cuts_ends_no_job(processes: Processes) -> None:
    """Law: those that are left go on with the cuts that all of them have."""
    first, *others = processes(4, decides, nodes=NODES, lost=[3], agent=True)[:3]
    assert first[0] == 3 and all(other == first for other in others)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while this is read
        return False


def alive() -> Counter[str]:
    """How many there are of what a generation has of its own."""
    kinds = (Communicator, LaneExecutor, Groups, ShmGroup, GlooTransport, RankPlans, Observer, StallWatch, LivenessRing)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def suffer(rank: int) -> dict[str, Any]:
    """Trains while a connection breaks, ranks are lost in the forward pass and in the recovery, and one freezes."""
    gc.disable()  # circles would hold a generation's groups and memory until it comes by
    dist.init_process_group("gloo")
    liveness.FROZEN_SECONDS = 3.0
    pids: list[Any] = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes: list[tuple[int, int]] = []
    kept: list[Counter[str]] = []

    def changed(old: View, new: View) -> None:
        sizes.append((state.steps, new.size))
        kept.append(alive())
        if new.size == 1:
            os.kill(pids[1], signal.SIGCONT)

    state = gradwire.HookState(model, elastic=True, on_membership_change=changed)
    model.register_comm_hook(state, gradwire.comm_hook)
    generator = torch.Generator().manual_seed(rank)
    digests: dict[int, bytes] = {}

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        while state.steps < STEPS:
            optimizer.zero_grad()
            if state.steps == 3 and rank == 0:
                for connection in connections():
                    connection.shut_down()
            if state.steps == 5 and rank == 3:
                model.register_forward_pre_hook(die)  # the others wait for the buffers
            if state.steps == 5 and rank == 2:
                Membership.next = die  # type: ignore[method-assign, assignment]  # the others have agreed that it is there
            if state.steps == 8 and rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            model(torch.randn(16, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            digests[state.steps] = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    except EvictedError as error:
        return {"digests": digests, "sizes": sizes, "kept": kept, "error": str(error)}
    state.close()
    deadline = time.monotonic() + 30  # this process serves the store, in which rank 1 still reads that it is given up
    while runs(pids[1]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"digests": digests, "sizes": sizes, "kept": kept, "error": None}


def test_what_else_can_happen_is_survived(processes: Processes) -> None:
    first, second, *_ = processes(4, suffer, nodes=NODES, lost=[2, 3])
    assert list(first["digests"]) == list(range(1, STEPS + 1))
    assert list(second["digests"]) == list(range(1, 9))
    assert all(first["digests"][step] == digest for step, digest in second["digests"].items())
    assert second["sizes"][0] == (4, 4)
    assert second["sizes"][-1] == (6, 2)
    assert first["sizes"] == [*second["sizes"], (9, 1)]
    assert first["error"] is None
    assert "rank 1 was removed from the job by the other ranks" in second["error"]
    for after_one, *later in (first["kept"], second["kept"]):
        assert after_one["Communicator"] == after_one["LaneExecutor"] == 1
        assert later
        for each in later:
            assert each <= after_one
