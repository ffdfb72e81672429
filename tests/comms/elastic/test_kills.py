"""Law: whenever a rank is killed, no other one hangs, is taken along, or leaves memory behind; elastic ones go on."""

import os
import random
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.processes import Processes
from support.shared_memory import left_since, segments

NODES = ["a", "a", "b", "b"]
STEPS = 6
LONGEST_SECONDS = 0.03
"""After which a rank is killed, at most: the moments below take from a few to some tens of milliseconds."""

MOMENTS = {
    "boot": "none",
    "hook": "int8",
    "first step": "dgc",
    "steady": "powersgd",
    "flush": "onebit",
    "save": "waterfill4",
    "close": "fp16",
}
"""When a rank is killed -> the compressor that is in use then."""

BEFORE_THE_HOOK = ("boot", "hook")
"""Who is killed then may not have come to the hook. In a group of gradwire's the others know all the same where he was;
of one of gloo's nothing is known, and they wait for the time-out."""


def train(rank: int, victim: int, moment: str, seed: int, elastic: bool) -> dict[str, Any]:
    """Trains and saves; one rank is killed shortly after the beginning of a moment."""

    def begins(now: str) -> None:
        if now == moment and rank == victim:
            after = random.Random(seed).uniform(0.0, LONGEST_SECONDS)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def live_through(now: str, do: Callable[[], object]) -> None:
        begins(now)
        do()
        if now == moment and rank == victim:
            signal.pause()  # this was quicker than its end

    backend = "gradwire" if moment in BEFORE_THE_HOOK and not elastic else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=30 if backend == "gloo" else 600))
    torch.manual_seed(0)
    begins("boot")
    found: dict[str, Any] = {"steps": 0}
    try:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 8)), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if moment == "boot" and rank == victim:
            signal.pause()
        begins("hook")
        state = gradwire.HookState(model, elastic=elastic, compressor=MOMENTS[moment])
        if moment == "hook" and rank == victim:
            signal.pause()
        model.register_comm_hook(state, gradwire.comm_hook)
        generator = torch.Generator().manual_seed(rank)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 96, generator=generator)).square().mean().backward()
            optimizer.step()
            found["steps"] += 1

        live_through("first step", step)
        while found["steps"] < STEPS:
            live_through("steady" if found["steps"] == STEPS // 2 else "", step)
        begins("flush")
        state.flush()
        live_through("flush", step)
        step()  # in which a rank is missed that was killed behind the last one
        live_through("save", lambda: state.gathered_state_dict(on_all_ranks=True))
        step()  # the same
        found["digest"] = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
        live_through("close", state.close)
        found["view"] = state.view.size if elastic else len(NODES)
    except RuntimeError as error:
        found["error"] = str(error)
    return found


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_a_rank_is_killed_the_others_go_on_or_end_with_an_error(
    moment: str, elastic: bool, processes: Processes
) -> None:
    before = segments()
    seed = list(MOMENTS).index(moment) * 2 + elastic
    victim = (3, 2, 1)[seed % 3]
    # A survivor that hangs, is ended by a signal, or raises anything but a RuntimeError, fails in `processes`.
    found = processes(4, train, victim, moment, seed, elastic, nodes=NODES, agent=True, lost=[victim])
    assert found[victim] is None
    survivors: list[Any] = [each for each in found if each is not None]
    assert len(survivors) == 3
    for each in survivors:
        if elastic and moment not in BEFORE_THE_HOOK:
            assert "error" not in each, each["error"]
            assert each["digest"] == survivors[0]["digest"]
            assert moment == "close" or each["view"] == 3
        elif not elastic and moment in ("first step", "steady", "flush"):
            assert f"rank {victim} of 4 is missing" in each["error"], each
        elif not elastic and moment == "hook":  # before it torch's own collectives fail, which name nobody
            assert re.search(rf"rank (\d, )*{victim}\b", each["error"]), each
    assert not left_since(before)
