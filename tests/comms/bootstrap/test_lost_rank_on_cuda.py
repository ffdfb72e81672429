"""Law: on CUDA, where NCCL waits for ever, a rank that is lost in any way ends in the CPU's error on every survivor."""

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from fake_cuda.drive import OPTIONS, Model, gradient, make_state
from fake_cuda.stalling_nccl import StallingNccl, Training, UsersGroup, stalling_cuda
from gradwire.comms import hook
from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from support.processes import Processes

SECONDS = 10.0
"""A survivor has its error; what is measured is a second or two, the rest is for busy machines."""
LOST_IN = 2
STEPS = 5
SHAPES = {"one_weight": (48, 64), "two_weight": (40, 90), "three_weight": (64, 40)}
BUCKETS = (("three_weight",), ("two_weight",), ("one_weight",))

_open = ExitStack()
"""What a rank's process has put into torch: until its end."""


def own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("gradwire")]


def train(rank: int, nodes: str, how: dict[int, str], options: dict[str, Any], untimed: bool) -> Any:
    """A rank's training, in the third step of which some ranks are lost; what a survivor was told."""
    size = len(nodes)
    torch.set_num_threads(1)
    server = "TORCHELASTIC_USE_AGENT_STORE" not in os.environ and rank == 0
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, None, server, timedelta(seconds=60), wait_for_workers=False)
    _open.enter_context(stalling_cuda(size))
    if untimed:
        _open.enter_context(patch.object(hook, "is_timed", lambda step: False))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = UsersGroup(store, rank, size, "default")
    model = Model(group, device, SHAPES)  # type: ignore[arg-type]
    state = make_state(group, model, nodes[rank], timeout=timedelta(seconds=options.pop("timeout", 60)), **options)  # type: ignore[arg-type]
    training = Training(state, model, device, rank)
    began, found = time.monotonic(), {"error": "none", "missing": (), "seconds": 0.0}
    try:
        for step in range(STEPS):
            began = time.monotonic()
            if step == LOST_IN and rank in how:
                lose(how[rank])
            training.step(BUCKETS, gradient(rank, step, SHAPES))
    except CollectiveError as error:
        found |= {"error": str(error), "missing": error.missing, "seconds": time.monotonic() - began}
    except ZeroDivisionError:
        found["error"] = "own"
    if how.get(rank) == "hang":
        found["seconds"] = 0.0
    del state, training, model
    began = time.monotonic()
    # What the interpreter does at its end. A process of the test's server skips it, and since Python 3.13 it has also
    # forgotten what was to be done: the finalizers are told again.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    found["exit_seconds"] = time.monotonic() - began
    deadline = time.monotonic() + SECONDS
    while (left := own_threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found | {
        "threads": left,
        "aborted": group.nccl.aborted.is_set(),
        "all aborted": all(each.aborted.is_set() for each in StallingNccl.made),
        "users shutdowns": group.nccl.shutdowns,
    }


def lose(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ZeroDivisionError("a bug of the user's")
    if how == "hang":
        time.sleep(6.0)


HIERARCHICAL = {"plan": "hierarchical"}
ONEBIT = {"compressor": "onebit", "compressor_options": OPTIONS["onebit"], "plan": "hierarchical"}


@pytest.mark.parametrize(
    ("nodes", "how", "options", "untimed"),
    [
        pytest.param("aabb", {2: "kill"}, HIERARCHICAL, False, id="killed"),
        pytest.param("ab", {1: "kill"}, ONEBIT, True, id="killed-compressed"),
        pytest.param("aa", {1: "kill"}, {"plan": "flat"}, True, id="killed-flat"),
        pytest.param("aabb", {1: "raise"}, ONEBIT, False, id="raises"),
        pytest.param("ab", {0: "raise"}, {"plan": "flat"}, True, id="raises-flat"),
        pytest.param("abbb", {1: "kill", 2: "kill", 3: "kill"}, HIERARCHICAL, False, id="node"),
    ],
)
def test_survivors_name_a_lost_rank(
    nodes: str, how: dict[int, str], options: dict[str, Any], untimed: bool, processes: Processes
) -> None:
    killed = [rank for rank in how if how[rank] == "kill"]
    results = processes(len(nodes), train, nodes, how, options, untimed, lost=killed, seconds=60, agent=True)
    check(results, how, len(nodes))


def check(results: Sequence[Any], how: dict[int, str], size: int) -> None:
    which, verb = ("rank", "is") if len(how) == 1 else ("ranks", "are")
    named = f"{which} {', '.join(map(str, sorted(how)))} of {size} {verb} missing"
    for rank, found in enumerate(results):
        if how.get(rank) == "kill":
            assert found is None
            continue
        assert found["threads"] == [], found
        assert found["users shutdowns"] == 0
        assert found["exit_seconds"] < SECONDS
        if rank in how:
            continue
        assert named in found["error"], found
        assert found["missing"] == tuple(sorted(how))
        assert found["seconds"] < SECONDS, found
        assert found["all aborted"], found


def test_a_rank_that_does_not_come_is_named_after_the_time_out(processes: Processes) -> None:
    results = processes(2, train, "ab", {1: "hang"}, HIERARCHICAL | {"timeout": 2.0}, False, seconds=60, agent=True)
    assert "rank 1 of 2 is missing" in results[0]["error"], results
    check(results, {1: "hang"}, 2)


def test_the_store_dies_with_rank_0(processes: Processes) -> None:
    results = processes(3, train, "aab", {0: "kill"}, HIERARCHICAL, False, lost=[0], seconds=60)
    for found in results[1:]:
        assert "the process that serves it is gone" in found["error"], found
        assert found["seconds"] < SECONDS
        assert found["threads"] == []
        assert found["all aborted"]
