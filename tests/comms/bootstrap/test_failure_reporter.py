"""A rank dies in the middle of a step: every survivor names it and the phase, soon, and nothing is left behind."""

import json
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.comms.bootstrap import probe
from gradwire.comms.bootstrap.addresses import listener
from gradwire.comms.bootstrap.compat import GradBucket, HashStore
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.bootstrap.kernel import own_kernel
from gradwire.comms.bootstrap.probe import PeerAddress, PeerTable, ProbeServer
from gradwire.comms.bootstrap.store import PollingStore, StoreUnreachableError
from gradwire.comms.errors import PeerError
from support.processes import Processes
from support.shared_memory import left_since, segments


def train(rank: int, victim: int) -> dict[str, object]:
    """Five steps, in the third of which one rank is killed; returns the error that a survivor gets."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = nn.parallel.DistributedDataParallel(nn.Linear(600, 500), bucket_cap_mb=0.1)
    state = gradwire.HookState(model, timeout=timedelta(seconds=20))

    def hook(state: gradwire.HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == victim and state.steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradwire.comm_hook(state, bucket)

    model.register_comm_hook(state, hook)
    began = time.monotonic()
    try:
        for _ in range(5):
            began = time.monotonic()
            model(torch.randn(4, 600)).sum().backward()
    except RuntimeError as error:
        return {"seconds": time.monotonic() - began, "error": str(error)}
    return {"error": "none"}


@pytest.mark.parametrize(("nodes", "victim"), [("aabb", 3), ("aab", 0)])
def test_the_survivors_name_the_missing_rank_and_the_phase(nodes: str, victim: int, processes: Processes) -> None:
    before = segments()
    results = processes(len(nodes), train, victim, nodes=nodes, agent=True, lost=[victim])
    for rank, found in enumerate(results):
        if rank == victim:
            assert found is None
            continue
        assert isinstance(found, dict)
        assert f"rank {victim} of {len(nodes)} is missing" in found["error"], found
        assert any(name in found["error"] for name in ("reduce_scatter", "all_reduce", "all_gather"))
        assert found["seconds"] < 30
    assert not left_since(before)


@pytest.mark.parametrize("published", [False, True])
def test_who_serves_the_store_and_ends_first_is_not_named(published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the others have heard from it which rank is lost, and not through the store alone."""
    store, opened = HashStore(), ProbeServer.open()
    with listener(1) as closed:
        gone = closed.getsockname()[1]
    ports = {0: opened.port, 1: opened.port, 2: gone}
    servers = {rank: PeerAddress(port, ("127.0.0.1",), own_kernel()) for rank, port in ports.items()}
    reporters = []
    for rank in (0, 1):
        opened.register("start", rank)
        known = None if published else PeerTable("start", rank, servers, server=opened)
        reporters.append(StoreFailureReporter(store, rank, 3, peer_table=known))
        if published:
            reporters[-1].publish("start")
    store.set("address/2", json.dumps([gone, ["127.0.0.1"], own_kernel()]))
    monkeypatch.setattr(probe, "FIRST_POLL_SECONDS", 0.0)
    serves, other = (reporter.peer_wait() for reporter in reporters)
    why = "rank 2 has ended before it had come: look at its output"
    assert str(serves.failure("before it had come")) == why

    def unreachable(*_: object) -> None:
        raise StoreUnreachableError("the store cannot be reached: the process that serves it is gone")

    monkeypatch.setattr(PollingStore, "_ask", unreachable)
    opened.unregister("start", 0)
    assert str(other.failure("before it had come")) == why
    opened.unregister("start", 1)
    for _ in range(3 if published else 1):  # each reporter has opened it, too
        opened.close()


@pytest.mark.parametrize("named", [[7], [1 << 30, 3], [0, 3]])
def test_who_is_no_rank_of_the_group_is_not_missing(named: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ranks a peer's report, the verdict or an error of a peer names: only those of the group can be lost."""
    report = {"dead": named, "launches": 0, "waiting": True, "overdue": False, "seen": "x fail: y", "own": True}
    for verdict in (None, json.dumps([named, {}])):
        store = HashStore()
        reporter = StoreFailureReporter(store, 0, 3)
        for rank in (1, 2):
            store.set(f"report/{rank}", json.dumps(report))
        if verdict is not None:
            store.set("collector", "1")
            store.set("verdict", verdict)
        error = reporter.diagnose(PeerError("a rank is gone", tuple(named[:1])), "all_reduce", (0,))
        assert error.missing == () and "none of the 3 ranks is missing" in str(error), error


def test_a_lost_rank_is_named_whichever_ranks_its_collective_joined() -> None:
    """Ranks 1 and 3 of a node share memory for one step of a plan; rank 1 is alive."""
    store = HashStore()
    report = {"dead": [], "launches": 0, "waiting": True, "overdue": False, "seen": "", "own": False}
    for rank in (0, 1):
        store.set(f"report/{rank}", json.dumps({**report, "phase": ""}))
    error = StoreFailureReporter(store, 2, 4).diagnose(
        PeerError("a rank is gone", (3,)), "reduce_scatter", (0, 1, 2, 3)
    )
    assert error.missing == (3,)
    store = HashStore()
    for rank in (0, 2):
        store.set(f"report/{rank}", json.dumps({**report, "phase": ""}))
    error = StoreFailureReporter(store, 1, 4).diagnose(PeerError("a rank is gone", (3,)), "reduce_scatter", (1, 3))
    assert error.missing == (3,)
