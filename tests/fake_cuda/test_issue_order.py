"""The order in which chunks are issued on CUDA, and how the side streams wait."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import NoReturn, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch

from gradwire.comms import streams
from gradwire.comms.bootstrap import failure_reporter
from gradwire.comms.bootstrap.compat import BackendWork, HashStore
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.lanes import Transition
from gradwire.comms.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Phase, Plan
from gradwire.comms.plan.rank_plans import Chunk, RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket, RunningAllReduce
from gradwire.comms.run.stream_executor import StreamExecutor
from gradwire.comms.streams import STREAMS, HostClock, IssuedWork, SideStreams
from gradwire.topology.cluster import Link
from support.simulate import two_level_cluster

HIERARCHICAL = (Phase(REDUCE_SCATTER, 0, 2), Phase(ALL_REDUCE, 1), Phase(ALL_GATHER, 0, 2))
FLAT = (Phase(ALL_REDUCE, 0, whole=True),)


class NoStreams:
    """In place of the side streams: everything is issued as it comes."""

    def begin(self, numbers: object, tensors: object) -> None: ...

    def of(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, number: int) -> Mock:
        return Mock()

    def wait(self, number: int, events: object) -> None: ...

    def sync_current_stream(self) -> None: ...


class Issuing(StreamExecutor):
    """Writes down (launch, chunk, phase) in the order of issue; its compressed phase takes some rounds."""

    def __init__(self, streams: object, rounds: int = 0) -> None:
        cluster = two_level_cluster([0, 0, 1, 1], Link(4e-6, 5e9), Link(30e-6, 25e6))
        reporter = StoreFailureReporter(HashStore(), 0, 4)
        super().__init__(Mock(), 0, cluster, None, reporter, streams, HostClock())  # type: ignore[arg-type]
        self.rounds = rounds
        self.issued: list[tuple[str, int, int]] = []

    def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> Iterator[Transition]:
        for index in range(len(run.rank_plan.plan.phases)):
            self.issued.append((str(run.all_reduce.layout), chunk.start, index))
            if index == 1:
                yield from (Transition((index, number), []) for number in range(1, self.rounds + 1))
            yield Transition((index + 1, 0), [])

    def send(self, name: str, phases: tuple[Phase, ...], chunks: int = 1, *, hold: bool = False) -> Bucket:
        flat = torch.zeros(4) if isinstance(self._streams, NoStreams) else Mock()
        bucket = Bucket.of(torch.zeros(4))
        turn = sum(phase.op != ALL_GATHER for phase in phases)
        cut = tuple(Chunk(number, number + 1, ()) for number in range(chunks))
        rank_plan = RankPlan(Plan("", phases, chunks, 16, 0.0, {}, ""), cut, ((0, 0),), turn, direct=False)
        self.start(AllReduce((flat,), name, (bucket,)), rank_plan, 1.0, False, hold=hold)  # type: ignore[arg-type]
        return bucket


def is_done(bucket: Bucket) -> bool:
    return bucket.future is not None and bucket.future.done()


def test_a_chunk_comes_down_behind_the_way_up_of_the_next() -> None:
    executor = Issuing(NoStreams())
    assert is_done(executor.send("a", HIERARCHICAL, 3))
    assert [(chunk, phase) for _, chunk, phase in executor.issued] == [
        *[(0, 0), (0, 1)],
        *[(1, 0), (1, 1), (0, 2)],
        *[(2, 0), (2, 1), (1, 2), (2, 2)],
    ]


def test_so_does_a_bucket_where_another_follows() -> None:
    executor = Issuing(NoStreams())
    first = executor.send("a", HIERARCHICAL, hold=True)
    assert not is_done(first)
    second = executor.send("b", HIERARCHICAL, hold=True)
    assert is_done(first)
    assert not is_done(second)
    executor.release()
    assert is_done(second)
    assert executor.issued == [("a", 0, 0), ("a", 0, 1), ("b", 0, 0), ("b", 0, 1), ("a", 0, 2), ("b", 0, 2)]


def test_a_bucket_that_never_comes_down_holds_none_back() -> None:
    executor = Issuing(NoStreams())
    first = executor.send("a", HIERARCHICAL, hold=True)
    second = executor.send("b", FLAT, hold=True)
    assert is_done(first)
    assert is_done(second)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_order_is_the_same_however_many_rounds_a_rank_needs(rounds: int) -> None:
    few, many = Issuing(NoStreams()), Issuing(NoStreams(), rounds)
    for executor in (few, many):
        for name in "abc":
            executor.send(name, HIERARCHICAL, 2, hold=True)
        executor.release()
    assert few.issued == many.issued


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]]:
    """Streams that only write down which stream waits for which."""

    def make() -> tuple[SideStreams, list[tuple[str, object]], list[Mock]]:
        waits: list[tuple[str, object]] = []
        sides: list[Mock] = []

        class Event:
            behind: object = None

            def record(self, stream: object) -> None:
                self.behind = stream

        def made(name: str) -> Mock:
            stream = MagicMock()
            stream.wait_event = lambda event: waits.append((name, event.behind))
            return stream

        def side(device: torch.device, priority: int) -> Mock:
            sides.append(made("side"))
            return sides[-1]

        computing = made("computing")
        monkeypatch.setattr(streams, "StepVerdict", Mock())
        monkeypatch.setattr(torch.cuda, "Stream", side)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
        return SideStreams(torch.device("cuda", 0)), waits, [computing, *sides]

    return make


def test_after_an_error_the_current_stream_waits_for_what_was_issued(
    recorded: Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_reporter, "PATIENCE", timedelta(0))  # the other ranks say nothing
    side_streams, waits, (computing, *sides) = recorded()

    class Failing(Issuing):
        def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> Iterator[Transition]:
            waits.append(("issue", None))
            raise torch.OutOfMemoryError("no memory left")
            yield

    with pytest.raises(torch.OutOfMemoryError):
        Failing(side_streams).send("a", HIERARCHICAL, 2)
    assert waits == [*[("side", computing)] * STREAMS, ("issue", None), *(("computing", side) for side in sides)]


def test_an_error_of_the_device_reaches_the_other_ranks(
    recorded: Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it every call raises, so nothing asks the device before the abort."""
    monkeypatch.setattr(failure_reporter, "PATIENCE", timedelta(0))
    side_streams, _, (computing, *_) = recorded()

    def failed(*_: object) -> NoReturn:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Failing(Issuing):
        def run_chunk(self, run: RunningAllReduce, chunk: Chunk) -> Iterator[Transition]:
            computing.wait_event = failed
            failed()
            yield

    executor = Failing(side_streams)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        executor.send("a", HIERARCHICAL, 2)
    assert "illegal memory access" in str(executor.failure)


def test_no_event_is_made_to_put_one_stream_behind_another(
    recorded: Callable[[], tuple[SideStreams, list[tuple[str, object]], list[Mock]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would cost the host more than to record the one that is there."""
    side_streams, waits, (computing, *sides) = recorded()
    made = Mock()
    monkeypatch.setattr(torch.cuda, "Event", made)
    side_streams.begin((0, 1), ())
    with side_streams.exclusive():
        pass
    side_streams.sync_current_stream()
    assert not made.called
    assert not any(stream.record_event.called for stream in (computing, *sides))
    first, second = sides
    begun, alone = [("side", computing)] * STREAMS, [("side", computing), ("side", second), ("side", first)]
    assert waits == [*begun, *alone, ("computing", first), ("computing", second)]


def test_a_work_is_not_asked_while_its_communicator_is_given_up() -> None:
    """Torch would answer under the lock that the abort holds."""

    class Aborting:
        def is_completed(self) -> bool:
            raise AssertionError("asked")

    assert IssuedWork(cast(BackendWork, Aborting()), lambda: True).query()
