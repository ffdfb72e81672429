"""Every class of bug is found when it is planted: in a small hook written for this, and in gradwire itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ReduceScatterOptions

from fake_cuda.drive import FIRST, REBUILT, TIMEOUT, Job, on_cuda, train
from fake_cuda.machine import Machine, RaceError, machine
from fake_cuda.nccl import FakeNccl, FakeWork, OrderError
from fake_cuda.streams import FakeEvent, FakeFuture, side_stream
from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.run import programs
from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.streams import SideStreams
from gradwire.compressors import residual
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.dense import WideSum
from gradwire.compressors.registry import make
from gradwire.compressors.residual import ElementStore

SIZE = 2
STEPS = 2
NUMEL = 64
NONE = "nothing"


class SmallHook:
    """Sums a bucket in two halves on two side streams, through a buffer of its own; one line may be missing."""

    def __init__(self, group: Any, rank: int, without: str) -> None:
        self._group = FakeNccl(PrefixStore("small", group.store), rank, SIZE)
        self._sides = [side_stream() for _ in range(2)]
        self._without = without
        self._rank = rank
        self._residual = torch.zeros(NUMEL, device="cuda")

    def reduce(self, bucket: Tensor, step: int) -> Any:
        without, compute = self._without, torch.cuda.current_stream()
        sent = bucket + self._residual
        future: Any = torch.futures.Future(devices=[bucket.device])
        for side in self._sides:
            if without != "the side streams' wait":
                side.wait_stream(compute)
            if without != "record_stream":
                sent.record_stream(side)
        halves = list(zip(self._sides, sent.chunk(2), bucket.chunk(2), strict=True))
        for side, half, target in halves:
            with torch.cuda.stream(side):
                part = half.new_empty(NUMEL // 2 // SIZE)
                work = self._group._reduce_scatter_base(part, half, ReduceScatterOptions())
                if without != "the reduce-scatter's wait":
                    work.wait()
                part.mul_(0.5)
                work = self._group._allgather_base(target, part, AllgatherOptions())
                if without != "the all-gather's wait":
                    work.wait()
                if without == "agreement" and self._rank == 0 and step == 1:
                    self._group.allreduce([part], dist.AllreduceOptions())
        if without == "disjoint halves":
            with torch.cuda.stream(self._sides[0]):
                bucket[: NUMEL // 2 + 1].mul_(1.0)
        if without == "device-side decisions":
            float(bucket.sum())
        last, *others = self._sides
        for other in others:
            if without != "the last stream's wait":
                last.wait_stream(other)
        with torch.cuda.stream(compute if without == "the completing stream" else last):
            future.set_result(bucket)
        if without == "the residual's order":
            with torch.cuda.stream(last):
                self._residual.mul_(0.5)
        return future


MUTATIONS: dict[str, tuple[type[Exception], str]] = {
    "the side streams' wait": (RaceError, "race"),
    "record_stream": (RaceError, "reuse"),
    "the reduce-scatter's wait": (RaceError, "race"),
    "the all-gather's wait": (RaceError, "race"),
    "disjoint halves": (RaceError, "race"),
    "the last stream's wait": (RaceError, "race"),
    "the completing stream": (RaceError, "race"),
    "the future's wait": (RaceError, "race"),
    "the residual's order": (RaceError, "race"),
    "device-side decisions": (RaceError, "host wait"),
    "agreement": (OrderError, "rank 0: "),
}


def small_training(without: str) -> tuple[list[list[float]], Machine]:
    def body(rank: int, device: torch.device, group: Any) -> list[float]:
        hook = SmallHook(group, rank, without)
        bucket = torch.empty(NUMEL, device=device)
        sums = []
        for step in range(STEPS):
            with machine().forbid_host_waits():
                bucket.fill_(float(rank + step))
                future = hook.reduce(bucket, step)
                torch.empty(1, device=device)
                if without != "the future's wait":
                    future.wait()
                sums.append(bucket.sum())
        return [float(each) for each in sums]

    return on_cuda(SIZE, body)


def test_the_small_hook_is_right() -> None:
    results, _ = small_training(NONE)
    assert results == [[NUMEL * 0.5, NUMEL * 1.5]] * SIZE


@pytest.mark.parametrize("without", MUTATIONS)
def test_a_small_hook_without(without: str) -> None:
    error, text = MUTATIONS[without]
    with pytest.raises(error, match=text):
        small_training(without)


@contextmanager
def ignored(owner: type, method: str, result: object = None) -> Iterator[None]:
    """A method that does nothing."""
    with patch.object(owner, method, lambda *_, **__: result):
        yield


@contextmanager
def one_ignored(owner: type, method: str, number: int, result: object) -> Iterator[None]:
    """A method that does nothing the `number`-th time on rank 0."""
    real: Callable[..., Any] = getattr(owner, method)
    calls = count()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if machine().here.device == 0 and next(calls) == number:
            return result
        return real(self, *arguments, **named)

    with patch.object(owner, method, call):
        yield


def gradwire_training(**options: Any) -> None:
    settings: dict[str, Any] = {"plan": {"name": "hierarchical", "chunks": 2}, "whole": True} | options
    on_cuda(4, train("aabb", (FIRST, REBUILT, REBUILT), **settings))


def test_gradwire_that_waits_for_no_collective() -> None:
    with ignored(FakeWork, "wait", True), pytest.raises(RaceError, match="race"):
        gradwire_training()


def test_gradwire_that_waits_for_one_collective_too_few() -> None:
    # Some waits are covered by a later one for the same communicator; most are not.
    found = 0
    for number in range(6):
        with one_ignored(FakeWork, "wait", number, True):
            try:
                gradwire_training()
            except RaceError:
                found += 1
    assert found >= 2


def test_gradwire_whose_streams_wait_for_nothing() -> None:
    with ignored(FakeEvent, "wait"), pytest.raises(RaceError, match="race"):
        gradwire_training()


def test_gradwire_whose_futures_order_nothing() -> None:
    with ignored(FakeFuture, "_join_current_streams"), pytest.raises(RaceError, match="race"):
        gradwire_training()


def test_gradwire_with_one_collective_too_few() -> None:
    nothing = FakeWork(None, [], [], 0, None)
    with one_ignored(FakeNccl, "_launch", 3, nothing), pytest.raises(CollectiveError, match="OrderError: rank"):
        gradwire_training()


class Forgetful(list[Any]):
    """Events that nobody will wait for."""

    def append(self, event: object) -> None: ...


bucket_of = Bucket.of


def forgetful(*arguments: Any, **named: Any) -> Bucket:
    """A bucket that does not wait for what carried its first pieces."""
    bucket = bucket_of(*arguments, **named)
    bucket.ends = Forgetful()
    return bucket


def bucket_in_pieces() -> None:
    """One bucket in several transfers, each of which ends with a kernel, on both side streams: one GPU a node."""

    def before(job: Job, step: int) -> None:
        if step == 1:
            job.state.fuse(FusionPlan(piece_nbytes=8192))

    options: dict[str, Any] = {"compressor": "int8", "plan": {"name": "hierarchical", "chunks": 1}}
    on_cuda(2, train("ab", (FIRST,) * 3, before=before, **options))


def bucket_let_go() -> None:
    """A tensor that nobody keeps, or waits for: its memory comes back to the stream that computes."""

    def body(rank: int, device: torch.device, group: Any) -> None:
        codec = make("onebit", {"warmup_steps": 0})
        config = Config(hostname="ab"[rank], timeout=TIMEOUT)
        communicator = Communicator(group.store, rank, SIZE, device, config, name="let go", compressor=codec)
        layout = Layout((Slice("weight", (64, 64), 0, 0, 4096),))
        for _ in range(2):
            flat = torch.ones(4096, device=device)
            communicator.all_reduce(flat, layout=layout)
            del flat
            torch.ones(4096, device=device)
        torch.cuda.synchronize()
        communicator.close()

    on_cuda(SIZE, body)


def state_moved() -> None:
    """A shard that one stream has made is added to on another one, and its old memory let go of."""

    def body(rank: int, device: torch.device, group: Any) -> None:
        store, (first, second) = ElementStore(), (side_stream() for _ in range(2))
        layout = Layout((Slice("weight", (64, 64), 0, 0, 4096),))
        with torch.cuda.stream(first):
            store.read(layout, device)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            store.adopt(layout, torch.ones(4096, device=device))
        with torch.cuda.stream(first):
            torch.ones(4096, device=device)
        torch.cuda.synchronize()

    on_cuda(1, body)


def wide_sum() -> None:
    """bfloat16 between three nodes: divided and summed in float32, rounded once."""

    def body(rank: int, device: torch.device, group: Any) -> Tensor:
        config = Config(hostname="abc"[rank], timeout=TIMEOUT)
        wide = WideSum()
        communicator = Communicator(group.store, rank, 3, device, config, name="wide", compressor=wide)
        layout = Layout((Slice("weight", (500,), 0, 0, 500),))
        flat = given[rank].to(device)
        found = communicator.all_reduce(flat, scale=1 / 3, layout=layout).wait().cpu()
        communicator.close()
        return found

    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(500, generator=generator).bfloat16() for _ in range(3)]
    results, _ = on_cuda(3, body)
    wanted = torch.stack(given).double().mean(0)
    for found in results:
        error = (found.double() - wanted).abs() / wanted.abs()
        assert float(error.max()) <= 2.0**-8 * 1.01, "rounded more than once"


def narrow_contribution(shard: Tensor, scale: float) -> Tensor:
    return shard.mul(scale).float()


def no_record_stream(streams: SideStreams, numbers: Any, tensors: Any) -> None:
    begin(streams, numbers, ())


begin = SideStreams.begin

PLANTED: dict[str, tuple[Callable[[], None], Any, type[Exception]]] = {
    "what travels is noted on its streams": (
        bucket_let_go,
        lambda: patch.object(SideStreams, "begin", no_record_stream),
        RaceError,
    ),
    "a bucket waits for all of its pieces": (
        bucket_in_pieces,
        lambda: patch.object(Bucket, "of", forgetful),
        RaceError,
    ),
    "what a store lets go of is kept until it is read": (
        state_moved,
        lambda: patch.object(residual, "keep_until_read", lambda *_: None),
        RaceError,
    ),
    "contributions are scaled in float32": (
        wide_sum,
        lambda: patch.object(programs, "_contribution", narrow_contribution),
        AssertionError,
    ),
    "the verdict comes behind the last bucket": (
        lambda: gradwire_training(compressor="int8"),
        lambda: patch.object(FakeFuture, "wait", lambda future: future.value()),
        RaceError,
    ),
}
"""A law, a training that needs it, what breaks it, and what then shows."""


@pytest.mark.parametrize("law", PLANTED)
def test_gradwire_keeps(law: str) -> None:
    run, _, _ = PLANTED[law]
    run()


@pytest.mark.parametrize("law", PLANTED)
def test_gradwire_breaks(law: str) -> None:
    run, broken, error = PLANTED[law]
    with broken(), pytest.raises(error):
        run()
