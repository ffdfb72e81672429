"""Laws: a bucket passes few files from the hook to the transports and back, and nothing calls back upward.

Four ranks on two nodes train; in a later step everything that one bucket enters is recorded, in all threads, from the
call of the hook until its future is done. Adding a file to the path, or a call from a lower file into a higher one,
fails here: extend the path below only where a reader of the path would want one more stop.
"""

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket
from support.processes import Processes

EXACT = (
    "comms.hook",
    "comms.step.backward_tracker",
    "comms.fusion",
    "comms.communicator",
    "comms.run.lane_executor",
    "comms.run.programs",
    "comms.run.phase_stats",
    "comms.run.all_reduces",
    "comms.lanes",
    "comms.transport.shm",
    "comms.transport.torch_group",
    "comms.transport.works",
)
"""From the top to the bottom: inside the node through shared memory, between the nodes through gloo."""

COMPRESSED = (
    *EXACT,
    "compressors.composite",
    "compressors.two_stage",
    "compressors.residual",
    "compressors.codecs.base",
    "compressors.kernels.native",
)
"""The codec's own file is not on it: that says how long a payload is, once for each length, and kernels do the rest."""
MOST_EXACT, MOST_COMPRESSED = 12, 17
"""Files of one question each: an executor, the programs that it takes forward, what it notes, and what it is given."""

MOST_OF_A_BUCKET = {"none": (50, 24), "int8": (80, 44)}
"""Compressor -> functions that a bucket enters on a rank, and hops from file to file: what a reader pays for. Counted
2026-11-30: up to 50 and 23, up to 80 and 43, five of them for an error that a step keeps until DDP is through; whether
a lane's look for work before the bucket, and that after it, are seen depends on other threads."""

Edge = tuple[str | None, str]
"""Whose frame is the nearest of ours above a call, and which module was called."""


class Recorder:
    """Writes down which module of gradwire calls which, in every thread that is started after it, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.edges: set[Edge] = set()
        self.functions: set[str] = set()
        self.hops: list[Edge] = []
        sys.setprofile(self._seen)
        threading.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and (called := module_of(frame)):
            above = frame.f_back
            while above is not None and module_of(above) is None:
                above = above.f_back
            edge = module_of(above) if above else None, called
            self.edges.add(edge)
            if not frame.f_code.co_name.startswith("<"):  # a comprehension has no name to know
                self.functions.add(f"{called}.{frame.f_code.co_qualname}")
            if edge[0] != called:
                self.hops.append(edge)


def module_of(frame: FrameType) -> str | None:
    """The module of gradwire that a frame belongs to; None for torch, Python, and code that has no file."""
    name = str(frame.f_globals.get("__name__", ""))
    inside = name.startswith("gradwire.") and not frame.f_code.co_filename.startswith("<")
    return name.removeprefix("gradwire.") if inside else None


Way = tuple[list[Edge], list[str], list[Edge]]
"""Which module has called which; the functions that were entered; the hops: each call from one module into another, and
each time that a generator goes on for another module."""


def record(rank: int, compressor: str) -> Way:
    """Trains on one rank, and returns what the middle bucket of the fifth step entered: it begins and ends no step."""
    recorder = Recorder()
    dist.init_process_group("gloo")
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)  # two layers a bucket
    # Without the stall watch: on a slow machine its thread may poll, or warn, while the bucket is recorded.
    state = gradwire.HookState(model, compressor=compressor, stall_seconds=0)
    step = 0

    def hook(state: gradwire.HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        recorder.on = step == 4 and bucket.index() == 1
        future = gradwire.comm_hook(state, bucket)
        future.wait()  # no other bucket is under way, or its frames would be seen too
        recorder.on = False
        return future

    model.register_comm_hook(state, hook)
    for step in range(5):  # noqa: B007 - the hook reads it
        model(torch.randn(8, 64)).sum().backward()
    dist.destroy_process_group()
    sys.setprofile(None)
    return sorted(recorder.edges, key=str), sorted(recorder.functions), recorder.hops


def upward(edges: Sequence[Edge], path: Sequence[str]) -> list[Edge]:
    """The calls from a module into one above it, and those into modules that are not on the path."""
    place = {name: number for number, name in enumerate(path)}
    return [
        (caller, called)
        for caller, called in edges
        if called not in place or (caller is not None and place.get(caller, len(path)) > place[called])
    ]


@pytest.mark.parametrize(("compressor", "path"), [("none", EXACT), ("int8", COMPRESSED)])
def test_a_bucket_takes_the_path_and_nothing_calls_back_upward(
    compressor: str, path: tuple[str, ...], processes: Processes
) -> None:
    for way in processes(4, record, compressor, nodes=["a", "a", "b", "b"]):
        assert isinstance(way, tuple)
        edges, functions, hops = way
        assert upward(edges, path) == []
        assert {called for _, called in edges} == set(path)
        assert [called for caller, called in edges if caller is None].count("comms.hook") == 1
        most_functions, most_hops = MOST_OF_A_BUCKET[compressor]
        assert len(functions) <= most_functions, f"{len(functions)} functions: {functions}"
        assert len(hops) <= most_hops, f"{len(hops)} hops: {Counter(hops)}"


def test_the_path_is_short() -> None:
    assert len(EXACT) <= MOST_EXACT
    assert len(COMPRESSED) <= MOST_COMPRESSED


@pytest.mark.parametrize(
    "edge", [("comms.run.programs", "comms.fusion"), ("comms.hook", "comms.futures"), ("torch_group", "comms.hook")]
)
def test_a_detour_is_noticed(edge: Edge) -> None:
    assert upward([(None, "comms.hook"), ("comms.hook", "comms.fusion"), edge], EXACT) == [edge]
