"""Law: whatever a joining process is, or lacks, those that train go on, and it gets the reason why it is refused."""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import HashStore, TCPStore
from gradwire.comms.elastic import joining
from gradwire.comms.elastic.joining import JoiningProcess, Requests, request_admission
from gradwire.comms.elastic.membership import EvictedError, View
from gradwire.comms.elastic.peer_info import packed
from gradwire.comms.elastic.transfer import check_state
from support.processes import Processes
from support.threads import run_ranks

TIMEOUT = timedelta(seconds=20)
SECONDS = 20.0
MODEL = {"weight": "float32 of [2, 2], trained"}


class Odd:
    """Something with a state that is not what it should be."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def fails() -> dict[str, Any]:
    raise RuntimeError("not consolidated")


RUNNING: dict[str, tuple[nn.Module, Callable[[], dict[str, Any]]]] = {
    "an object": (nn.Linear(4, 4), lambda: {"odd": an_object()}),
    "a state that cannot be had": (nn.Linear(4, 4), fails),
}
JOINING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an object": (lambda: nn.Linear(4, 4), "holds what cannot be sent"),
    "a state that cannot be had": (lambda: nn.Linear(4, 4), "not consolidated"),
    "shapes that broadcast": (lambda: nn.Linear(1, 4), r"`weight` of the model is float32 of \[4, 1\]"),
    "other shapes": (lambda: nn.Linear(4, 5), r"`weight` of the model is float32 of \[5, 4\]"),
    "another dtype": (lambda: nn.Linear(4, 4).bfloat16(), "is bfloat16 of"),
}


def an_object() -> object:
    """Neither a number nor a tensor."""
    return timedelta(seconds=1)


def train(rank: int, kind: str) -> tuple[int, int, int] | str:
    """Two ranks train until the third, which wants to join, has been told something."""
    os.environ["WORLD_SIZE"] = "2"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    module, state_of = RUNNING.get(kind, (nn.Linear(4, 4), lambda: {"number": 1.0}))
    if rank == 2:
        os.environ["GRADWIRE_ELASTIC"] = f"{host}:{port}"
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        module = JOINING[kind][0]()
    else:
        dist.init_process_group("gloo")
    model = DistributedDataParallel(module)
    try:
        state = gradwire.HookState(model, elastic=True, extra_state=[Odd(state_of)], timeout=timedelta(seconds=60))
    except EvictedError as error:
        TCPStore(host, port, is_master=False, wait_for_workers=False).set("told", "1")
        return str(error)
    model.register_comm_hook(state, gradwire.comm_hook)
    check_factors(model.process_group)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    over = torch.zeros(1)
    while not over.any():
        model.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        over.fill_(float(store.check(["told"])))
        dist.all_reduce(over, group=model.process_group)
    state.close()
    return state.view.generation, state.view.size, state.steps


def check_factors(group: dist.ProcessGroup) -> None:
    """A factor of zero is a factor; integers take none, and the refused call is no operation of the group."""
    for factor, wanted in ((0.0, 0.0), (0.5, 3.0)):
        summed = torch.full((2,), 3.0)
        dist.all_reduce(summed, dist._make_nccl_premul_sum(factor), group=group)  # type: ignore[attr-defined]
        assert summed.tolist() == [wanted, wanted]
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="sum or average"):
        group.allreduce([torch.ones(2, dtype=torch.int32)], options)


@pytest.mark.parametrize("kind", list(JOINING))
def test_a_newcomer_that_does_not_fit_is_refused_and_nobody_else_hears_of_it(processes: Processes, kind: str) -> None:
    *trained, told = processes(3, train, kind, nodes=["a", "b", "c"])
    (generation, size, steps), other = trained
    assert (generation, size) == (0, 2)
    assert other == (generation, size, steps)
    assert re.search(JOINING[kind][1], told), told


def test_a_number_of_numpy_is_handed_over() -> None:
    np = pytest.importorskip("numpy")
    check_state(lambda: {"carried": [{"last_lr": [np.float64(0.1)], "steps": np.int64(3)}]})


def fits(process: JoiningProcess) -> None:
    """Whoever it is."""


def asked(store: Any, wanted: str, **word: object) -> int:
    """Leaves a request as a process does that is killed, or of another version; its number."""
    number = int(store.add("join/count", 1))
    if wanted == "request":
        own = {"name": "new", "shared": {"plan": "auto"}, "peer_info": peer_info(), "model": MODEL}
        store.set(f"join/{number}/request", json.dumps({**own, **word}))
    return number


def peer_info() -> str:
    """What a process says about itself."""
    from gradwire.comms.bootstrap.placement import PeerInfo
    from gradwire.comms.config import Config

    return packed(PeerInfo.here(0, 1, Config(), torch.device("cpu")))


def look(requests: Requests, wanted: Callable[[], bool]) -> int:
    """Looks as rank 0 does at the end of each step."""
    deadline = time.monotonic() + SECONDS
    listed = 0
    while not wanted() and not listed:
        assert time.monotonic() < deadline
        listed = requests.poll(fits)
        time.sleep(0.02)
    return listed


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ({"shared": {"plan": "flat"}}, "`plan` is flat here and auto in the running job"),
        ({"shared": 3}, "cannot be read"),
        ({"peer_info": "no base64"}, ""),
        ({"model": {}}, "`weight` of the model is missing here"),
        ({"model": {"weight": "float32 of [2, 1], trained"}}, "[2, 1], trained here and float32 of [2, 2]"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(word: dict[str, object], reason: str) -> None:
    store = HashStore()
    number = asked(store, "request", **word)
    requests = Requests(store, TIMEOUT, {"plan": "auto"}, MODEL)
    assert look(requests, lambda: store.check([f"join/{number}/answer"])) == 0
    assert reason in json.loads(store.get(f"join/{number}/answer"))["refused"]
    requests.close()


def test_who_is_killed_between_its_two_writes_keeps_nobody_out() -> None:
    store = HashStore()
    asked(store, "nothing")
    asked(store, "request")  # and this one before its first sign of life
    requests = Requests(store, TIMEOUT, {"plan": "auto"}, MODEL)
    answered: list[View] = []

    def rank(index: int) -> None:
        if index:
            answered.append(request_admission(store, {"plan": "auto"}, TIMEOUT, peer_info(), MODEL)[0])
            return
        listed = look(requests, lambda: False)
        processes = requests.listed(listed)
        assert [number for number, _, _ in processes] == [3]
        view = View(1, 0, ("rank 0", processes[0][1]))
        requests.answer(processes, view, {"rank 0": peer_info(), processes[0][1]: processes[0][2]})

    run_ranks(2, rank)
    assert (answered[0].rank, answered[0].generation) == (1, 1)
    assert requests.poll(fits) == 0
    requests.close()


def test_who_says_nothing_for_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FORGOTTEN_SECONDS", 0.5)
    store = HashStore()
    number = asked(store, "nothing")
    requests = Requests(store, TIMEOUT, {}, MODEL)
    look(requests, lambda: store.check([f"join/{number}/answer"]))
    assert "no heartbeat" in json.loads(store.get(f"join/{number}/answer"))["refused"]
    requests.close()


def test_no_step_waits_for_a_store_that_does_not_answer() -> None:
    store = HashStore()
    requests = Requests(store, TIMEOUT, {}, MODEL)
    asking = threading.Event()
    answers = threading.Event()

    def stall(key: str, value: int) -> int:
        asking.set()
        answers.wait(SECONDS)
        return 0

    requests._store.add = stall  # type: ignore[method-assign]
    assert requests.poll(fits) == 0
    assert asking.wait(SECONDS)
    assert requests.poll(fits) == 0  # though the answer to the thread's question is open
    assert not answers.is_set()
    answers.set()
    requests.close()
