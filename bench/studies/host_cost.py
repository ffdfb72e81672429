"""Measures what the hook costs the host for one bucket on the CUDA path, without a GPU.

All Python code runs as it does there: hook state, fusion, plans, executor, compressors. NCCL's collectives, streams,
events and kernels are replaced by calls that do nothing. So a figure is a lower bound for a machine with a GPU, where
each call of CUDA and NCCL adds some microseconds of its own; those calls are counted. The tensors are small, so that
what torch computes in place of kernels takes hardly any time.

    python -m gradwire.bench.studies.host_cost --nodes 2 --gpus 8

With `--device cuda`, on a machine with a GPU, streams, events, futures and kernels are real, and NCCL's collectives
alone are left out. Feeds docs/results/gpu.md.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.page import markdown
from gradwire.comms import communicator as communicator_module
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.placement import PeerInfo
from gradwire.comms.bootstrap.rendezvous import PeerInfos
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.config import Config
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.plan.codec_price import layout_of
from gradwire.comms.run.all_reduces import Bucket, Times
from gradwire.comms.run.stream_executor import StreamExecutor
from gradwire.comms.streams import HostClock, SideStreams
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.compressors.base import Compressor, Layout
from gradwire.compressors.kernels import dispatch, reference

BUCKETS = 8
"""Number of buckets in a step."""
SLICES, SHAPE = 12, (32, 64)
"""Number of parameters in a bucket, and the shape of each."""
NUMEL = SLICES * math.prod(SHAPE)
STEPS = 30
ROUNDS = 7
"""Number of timed rounds; the fastest counts, because disturbances only make a round slower."""
CPU = torch.device("cpu")

COMPRESSORS: dict[str, dict[str, bool | int | float | str]] = {
    "none": {},
    "bf16": {},
    "int8": {},
    "onebit": {"warmup_steps": 0},
    "dgc": {"warmup_steps": 0},
    "powersgd": {"warmup_steps": 0},
}


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Holds the host's cost of one bucket.

    Attributes:
        plan: Name of the plan.
        compressor: Name of the compressor.
        microseconds: Processor time of the training thread for a bucket, in the fastest round.
        calls: Name of a call of CUDA or NCCL -> number of calls for a bucket.
    """

    plan: str
    compressor: str
    microseconds: float
    calls: dict[str, float]


class _NoWork:
    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([torch.empty(0)])
        return done


class _NoGroup:
    """Stands for torch's NCCL group: every method counts its call and does nothing."""

    def __init__(self, calls: "collections.Counter[str]") -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., _NoWork]:
        def issue(*_: object) -> _NoWork:
            self._calls[name] += 1
            return _NoWork()

        setattr(self, name, issue)
        return issue


class _NoStreams(SideStreams):
    """Stands for CUDA's side streams: counts the calls of events and streams, and does nothing."""

    def __init__(self, calls: "collections.Counter[str]") -> None:
        self._calls = calls

    def begin(self, numbers: Iterable[int], tensors: Iterable[Tensor]) -> None:
        streams = len({number % 2 for number in numbers})
        self._calls["event record"] += 1
        self._calls["event wait"] += streams
        self._calls["record_stream"] += streams * len(list(tensors))

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        self._calls["set stream"] += 2
        yield

    def mark(self, number: int) -> Any:
        self._calls["event record"] += 1

    def wait(self, number: int, events: Iterable[object]) -> None:
        self._calls["event wait"] += len(list(events))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        yield

    def sync_current_stream(self) -> None: ...


class _NoKernels:
    """Stands for all kernels: they do nothing, but for dgc's indices, which are set to 0 so that they are valid."""

    def dgc_step_many(self, *arguments: Any) -> None:
        *_, indices, _values = arguments
        indices.zero_()

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert hasattr(reference, name), name
        return lambda *_, **__: None


class _OnCuda(Bucket):
    """Represents a bucket whose future has no callback, as on CUDA."""

    def result(self) -> Any:
        if self.future is None:
            self.future = torch.futures.Future()
        return self.future


def host_cost(
    nodes: int,
    gpus: int,
    plan: str,
    compressor: str,
    *,
    device: torch.device = CPU,
    rounds: int = ROUNDS,
) -> HostCost:
    """Measures what a bucket costs the host under one plan and compressor, as rank 0 of an imaginary cluster.

    Args:
        nodes: Number of nodes.
        gpus: Number of GPUs of each node.
        plan: `flat` or `hierarchical`.
        compressor: Name of the compressor; `none` is exact.
        device: Device of the tensors. On a CUDA device streams and kernels are real; on a CPU they are replaced by
            calls that do nothing.
        rounds: Number of rounds of `STEPS` steps that are timed; 1 is enough to count calls.
    """
    with patch.dict(dispatch.KERNELS_ON, {"cpu": cast(Any, _NoKernels())}):
        return _measured(nodes, gpus, plan, compressor, device, rounds)


def _measured(nodes: int, gpus: int, plan: str, compressor: str, device: torch.device, rounds: int) -> HostCost:
    calls: collections.Counter[str] = collections.Counter()
    communicator, made = _communicator(nodes, gpus, plan, compressor, calls, device)
    fusion = Fusion(FusionPlan())
    layouts = [_layout(number) if made else None for number in range(BUCKETS)]
    flats = [torch.zeros(NUMEL, device=device) for _ in range(BUCKETS)]
    make = Bucket if device.type == "cuda" else _OnCuda
    scale, executor = 1 / communicator.size, communicator.executor

    def step() -> None:
        for flat, layout in zip(flats, layouts, strict=True):
            bucket = make(flat, layout, Times())
            for launch in fusion.add(bucket):
                communicator.start(launch, scale=scale, hold=True)
            bucket.result()
        fusion.end_step()
        executor.release()
        executor.extremes()
        if made:
            made.end_step(finite=True)

    for _ in range(3):
        step()
    calls.clear()
    step()
    each = {name: count / BUCKETS for name, count in sorted(calls.items())}
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(STEPS):
            step()
        times.append((time.thread_time() - began) / STEPS / BUCKETS)
    cast(Any, communicator)._groups.close(0.0)  # the other ranks, which are not there, are not waited for
    communicator.close()
    return HostCost(plan, compressor, min(times) * 1e6, each)


def _communicator(
    nodes: int, gpus: int, plan: str, name: str, calls: "collections.Counter[str]", device: torch.device
) -> tuple[Communicator, Compressor | None]:
    """Makes rank 0's communicator of an imaginary cluster, as on CUDA, and its compressor (None for `none`)."""
    size = nodes * gpus

    def peer_infos(store: object, own: PeerInfo, *arguments: object) -> PeerInfos:
        said = [dataclasses.replace(own, rank=rank, host=(f"node{rank // gpus}", "", "")) for rank in range(size)]
        return PeerInfos.of(said, generation="of nobody")

    made = None if name == "none" else Compression(name, COMPRESSORS[name], (), 0, size).compressor
    with patch.object(communicator_module, "exchange", peer_infos):
        communicator = Communicator(HashStore(), 0, size, device, Config(plan=plan), name="host_cost", compressor=made)
    groups, executor = cast(Any, communicator)._groups, communicator.executor
    groups._make = lambda key, members: NcclTransport(cast(Any, _NoGroup(calls)), members.index(0), len(members))
    communicator._connected = True
    if device.type != "cuda":
        groups._device = torch.device("cuda", 0)
        cast(Any, communicator.rank_plans)._device_type = "cuda"
        communicator.rank_plans.chooser.library = "nccl"
        reporter = cast(Any, communicator)._reporter
        executor = communicator.executor = StreamExecutor(
            groups, 0, communicator.cluster, made, reporter, _NoStreams(calls), HostClock()
        )
    executor.stats.timing = False
    executor.checking = made is not None
    return communicator, made


def _layout(number: int) -> Layout:
    return layout_of([(f"layers.{number}.{index}.weight", SHAPE) for index in range(SLICES)])


def table(costs: Sequence[HostCost]) -> str:
    """Returns the costs as a table in Markdown."""
    rows = [["plan", "compressor", "us a bucket", "calls of CUDA and NCCL"]]
    for cost in costs:
        rows.append([cost.plan, cost.compressor, f"{cost.microseconds:.0f}", f"{sum(cost.calls.values()):g}"])
    return markdown(rows)


def main() -> None:
    """Measures what a bucket costs the host under each setting, and prints a table in Markdown.

    The settings are the flat exact plan, and the hierarchical plan without a compressor and with each of `COMPRESSORS`,
    on an imaginary cluster in this process alone. A row has the microseconds of processor time and the number of calls
    of CUDA and NCCL for a bucket; `--calls` prints the number of each call by name, below the table.
    """
    parser = StudyParser("host_cost", __doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", action="store_true", help="name the calls")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else CPU
    settings = [("flat", "none"), *(("hierarchical", name) for name in COMPRESSORS)]
    costs = [host_cost(given.nodes, given.gpus, plan, name, device=device) for plan, name in settings]
    print(table(costs))
    if given.calls:
        for cost in costs:
            print(cost.plan, cost.compressor, cost.calls)


if __name__ == "__main__":
    main()
