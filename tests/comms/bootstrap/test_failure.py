"""A rank dies in the middle of a step: every survivor names it and the phase, soon, and nothing is left behind."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket
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
