"""Law: on CUDA whatever ends a launch, or gradwire, on one rank is heard by all, and nothing else is an alarm."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fake_cuda.drive import OPTIONS, Job, Model, gradient, group_options, make_state
from fake_cuda.stalling_nccl import StallingNccl, Training, UsersGroup, stalling_cuda
from gradwire.bench.studies.gpu.backward import HandedBucket, in_backward
from gradwire.comms import hook
from gradwire.comms.backend.planned import STEPS_IN_A_ROW, PlannedAllReduce
from gradwire.comms.bootstrap import failure_reporter, liveness
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.config import Config
from gradwire.comms.run.all_reduces import Bucket
from gradwire.comms.run.stream_executor import StreamExecutor
from gradwire.comms.step import optimizer_guard
from gradwire.comms.transport.groups import Groups
from support.threads import run_ranks

Memory = Callable[[int], Any]
SHAPES = {"one_weight": (48, 64), "two_weight": (40, 90)}
BUCKETS = (("two_weight",), ("one_weight",))
HIERARCHICAL = {"plan": "hierarchical"}
SECONDS = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(failure_reporter, "PROBE_AFTER", timedelta(seconds=0.2))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not [each.name for each in threading.enumerate() if each.name.startswith("gradwire")])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Rank:
    """A model, its state and its training on one rank, a thread."""

    def __init__(self, store: Any, rank: int, nodes: str, together: threading.Barrier, **options: Any) -> None:
        torch.cuda.set_device(rank)
        self.rank = rank
        self.together = together
        self.device = torch.device("cuda", rank)
        self.group = UsersGroup(store, rank, len(nodes), f"world of rank {rank}, {id(store)}")
        self.model = Model(self.group, self.device, SHAPES)  # type: ignore[arg-type]
        self.state = make_state(
            self.group,  # type: ignore[arg-type]
            self.model,
            nodes[rank],
            timeout=timedelta(seconds=SECONDS),
            **options,
        )
        self.training = Training(self.state, self.model, self.device, rank)

    def step(self, number: int = 0) -> None:
        self.training.step(BUCKETS, gradient(self.rank, number, SHAPES))

    def error(self, steps: int = 1) -> Exception | None:
        """What a few steps raise."""
        try:
            for number in range(steps):
                self.step(number)
        except (RuntimeError, ValueError) as error:
            return error
        return None


def on_ranks(nodes: str, body: Callable[[Rank], Any], fakes: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """Runs a body on every rank, with more fakes in torch.cuda, and closes the states when all are through."""
    store = HashStore()
    through, together = (threading.Barrier(len(nodes), timeout=60) for _ in range(2))

    def run(number: int) -> Any:
        rank = Rank(store, number, nodes, together, **options)
        try:
            return body(rank)
        finally:
            through.wait()
            rank.state.close()

    with stalling_cuda(len(nodes)), patch.multiple(torch.cuda, **(fakes or {})) if fakes else nullcontext():
        return run_ranks(len(nodes), run)


@pytest.mark.parametrize("untimed", [False, True])
@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_steps_go_on_and_nobody_is_missed(
    plan: str, untimed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks close in any order, the first one long before the last."""
    if untimed:
        monkeypatch.setattr(hook, "is_timed", lambda step: False)

    def body(rank: Rank) -> None:
        assert rank.error(3) is None
        time.sleep(0.2 * ((rank.rank + 1) % 3))
        rank.state.close()
        rank.state.close()
        rank.group.nccl.shutdown()

    with caplog.at_level(logging.WARNING, "gradwire"):
        on_ranks("aab", body, plan=plan)
    assert not caplog.records
    own = [each for each in StallingNccl.made if each.options.group_name.startswith("gradwire")]
    assert all(each.aborted.is_set() == (each in own) for each in StallingNccl.made)
    assert bool(own) == (plan == "hierarchical")


def test_several_communicators_and_new_ones_on_the_same_store(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: Rank) -> None:
        for _ in range(2):
            other = make_state(rank.group, rank.model, "ab"[rank.rank], plan="hierarchical")  # type: ignore[arg-type]
            training = Training(other, rank.model, rank.device, rank.rank)
            training.step(BUCKETS, gradient(rank.rank, 0, SHAPES))
            assert rank.error() is None
            other.close()

    with caplog.at_level(logging.WARNING, "gradwire"):
        on_ranks("ab", body, plan="hierarchical")
    assert not caplog.records


def test_a_rank_that_goes_on_alone_is_told_who_has_left() -> None:
    def body(rank: Rank) -> Exception | None:
        assert rank.error() is None
        if rank.rank == 1:
            rank.state.close()
            return None
        return rank.error(3)

    error, _ = on_ranks("ab", body, plan="hierarchical")
    assert isinstance(error, CollectiveError)
    assert error.missing == (1,)
    assert "rank 1 has left after 2 launches" in str(error)


def test_closed_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was held back never comes: the others hear of it, and this rank in its next call."""
    everybody = threading.Barrier(4)

    def body(rank: Rank) -> Exception | None:
        assert rank.error() is None
        everybody.wait(60)
        if rank.rank == 1:
            reduce = rank.state.reduce

            def close_before(bucket: HandedBucket) -> object:
                if bucket.is_last():
                    rank.state.close()
                return reduce(bucket)

            rank.state.reduce = close_before
        return rank.error(3)

    other, own = on_ranks("aabb", body, plan="hierarchical")[:2]
    assert isinstance(other, CollectiveError)
    assert other.missing == (1,)
    assert "is closed" in str(own)


def test_closed_before_the_first_bucket_and_started_all_the_same() -> None:
    def body(rank: Rank) -> Exception | None:
        rank.state.close()
        began = time.monotonic()
        error = rank.error()
        assert time.monotonic() - began < failure_reporter.PATIENCE.total_seconds()
        return error

    for error in on_ranks("ab", body, plan="hierarchical"):
        assert "gradwire is closed" in str(error)


def test_an_abort_is_heard_by_the_others() -> None:
    def body(rank: Rank) -> Exception | None:
        if rank.rank == 1:
            rank.state._session.communicator.abort("the user has had enough")
            return None
        return rank.error(3)

    error, _ = on_ranks("ab", body, plan="hierarchical")
    assert isinstance(error, CollectiveError)
    assert "the user has had enough" in str(error)


def test_the_backend_names_a_lost_rank() -> None:
    store, through = HashStore(), threading.Barrier(3, timeout=60)

    def run(rank: int) -> Any:
        torch.cuda.set_device(rank)
        timeout = timedelta(seconds=SECONDS)
        config = Config(hostname="aab"[rank], plan="hierarchical", timeout=timeout)
        planned = PlannedAllReduce(group_options(store, rank, 3, "backend"), config)
        tensor = torch.ones(5000, device=torch.device("cuda", rank))
        try:
            planned.all_reduce([tensor], 1.0).wait()
            torch.cuda.synchronize()
            if rank == 2:
                planned.abort("a test ends this rank")
                return None
            for _ in range(3):
                planned.all_reduce([tensor, tensor], 1.0).wait()
                torch.cuda.synchronize()
        except RuntimeError as error:
            return error
        finally:
            through.wait()
            planned.close()
            planned.close()

    with stalling_cuda(3):
        for error in run_ranks(3, run)[:2]:
            assert isinstance(error, CollectiveError)
            assert "a test ends this rank" in str(error)


def test_a_rank_that_fails_while_nccl_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's init returns when all have come, and nothing ends it: the others give it up."""
    connect, connecting = Groups.connect, threading.Barrier(3, timeout=60)

    def leave(groups: Groups, *sets: Any) -> None:
        connecting.wait()  # who hears of it before says that an all-reduce failed
        if groups._rank == 2:
            raise ZeroDivisionError("a bug of the user's")
        connect(groups, *sets)

    monkeypatch.setattr(Groups, "connect", leave)
    store, began = HashStore(), time.monotonic()

    def run(number: int) -> str:
        try:
            Rank(store, number, "aab", threading.Barrier(3), plan="hierarchical").state.close()
        except CollectiveError as error:
            return str(error)
        return "nothing"

    with stalling_cuda(3):
        errors = run_ranks(3, run)
    gc.collect()  # the states that were never finished
    assert time.monotonic() - began < 2 * SECONDS
    for rank, error in enumerate(errors):
        assert f"connecting NCCL failed on rank {rank}" in error
        assert "ZeroDivisionError: a bug of the user's" in error


@pytest.mark.parametrize(("given", "wanted"), [(0, 7200), (20, 20)])
def test_the_time_out_is_the_users_groups(given: int, wanted: int) -> None:
    """Adding the hook ends no job that goes on without it; torch's watchdog ends none that gradwire has given up."""
    store = HashStore()

    def run(number: int) -> tuple[float, list[float]]:
        torch.cuda.set_device(number)
        group = UsersGroup(store, number, 2, f"patient {number}, {given}")
        group.nccl.options._timeout = timedelta(hours=2)
        model = Model(group, torch.device("cuda", number), SHAPES)  # type: ignore[arg-type]
        state = make_state(group, model, "ab"[number], timeout=timedelta(seconds=given), plan="hierarchical")  # type: ignore[arg-type]
        Training(state, model, torch.device("cuda", number), number).step(BUCKETS, gradient(number, 0, SHAPES))
        deadline = state._session.communicator.executor.deadline
        assert state.config.timeout == timedelta(seconds=deadline._seconds)
        own = [each.options._timeout for each in StallingNccl.made if each.options.group_name.startswith("gradwire")]
        state.close()
        assert group.nccl.options._timeout == timedelta(hours=2)
        return deadline._seconds, [each.total_seconds() for each in own]

    with stalling_cuda(2):
        for seconds, own in run_ranks(2, run):
            assert seconds == wanted
            assert all(each >= wanted + 3600 for each in own)


def test_no_optimizer_steps_on_what_was_not_averaged() -> None:
    """The host has run ahead of the device: what is lost shows after the backward pass, and before the next one."""
    issued = threading.Event()

    def body(rank: Rank) -> Any:
        assert rank.error() is None
        executor = rank.state._session.communicator.executor
        if rank.rank == 1:
            assert issued.wait(60)
            rank.state._session.communicator.abort("the user has had enough")
            return None
        Job.step(rank.training, BUCKETS, gradient(rank.rank, 1, SHAPES))  # without a wait for the device
        issued.set()
        until(lambda: executor.failure_handler.error is not None)
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        with pytest.raises(CollectiveError, match="the user has had enough"):
            torch.optim.SGD([weight], lr=1.0).step()
        assert weight.eq(1).all()
        flat = torch.ones(8, device=rank.device)
        bucket = Bucket.of(flat)
        bucket.result().set_result(flat)
        executor.poison(bucket)
        assert flat.cpu().isnan().tolist() == [True] + [False] * 7
        rank.state.close()
        assert rank.state not in optimizer_guard._guarded
        return True

    assert on_ranks("ab", body, plan="hierarchical")[0]


def test_a_planned_sum_that_goes_directly_is_done_when_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store, late = HashStore(), threading.Event()

    def run(rank: int) -> None:
        torch.cuda.set_device(rank)
        config = Config(hostname="aa"[rank], plan="flat", timeout=timedelta(seconds=SECONDS))
        planned = PlannedAllReduce(group_options(store, rank, 2, "direct"), config)
        tensor = torch.ones(500, device=torch.device("cuda", rank))
        for _ in range(STEPS_IN_A_ROW):  # timed: they go by the side streams
            planned.all_reduce([tensor], 1.0).wait()
        torch.cuda.synchronize()
        executor = planned._communicators["cuda"].executor
        assert isinstance(executor, StreamExecutor)
        if rank == 1:
            assert late.wait(60)
        work = planned.all_reduce([tensor], 1.0)
        if rank == 0:
            assert not work.is_completed()
            assert executor.is_in_flight, "or nobody would notice that the other rank does not come"
            late.set()
        until(work.is_completed)
        work.wait_on_host()
        planned.close()

    with stalling_cuda(2):
        run_ranks(2, run)


def test_a_capture_is_refused_and_the_next_step_goes_on() -> None:
    capturing = threading.local()

    def body(rank: Rank) -> None:
        for begun in (0, 2):
            capturing.now = True
            assert "a CUDA graph is being captured" in str(rank.error())
            assert rank.state._session.communicator.executor.launches == 2 * begun
            capturing.now = False
            assert rank.error(2) is None
            assert rank.state.steps == begun + 2

    def is_capturing() -> bool:
        return getattr(capturing, "now", False)

    on_ranks("ab", body, {"is_current_stream_capturing": is_capturing}, plan="hierarchical")


@pytest.mark.parametrize("fusion_mb", [0.0, 32.0])
def test_a_bucket_on_another_device_is_refused_untouched(fusion_mb: float) -> None:
    def body(rank: Rank) -> Exception | None:
        assert rank.error() is None
        if rank.rank == 0:
            return rank.error(3)
        flat = torch.ones(3600, device=torch.device("cuda", 0))
        parameter = dict(rank.model.named_parameters())["two_weight"]
        with pytest.raises(ValueError, match="`flat` is on cuda:0; wanted cuda:1"):
            in_backward(lambda: rank.state.reduce(HandedBucket(0, flat, [parameter], True)))
        assert flat.cpu().eq(1).all()
        rank.state.close()
        return None

    error, _ = on_ranks("ab", body, plan="hierarchical", fusion=fusion_mb)
    assert isinstance(error, CollectiveError)
    assert error.missing == (1,)


def test_an_error_after_a_bucket_that_has_the_future_of_its_collective_is_the_one_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a bucket was issued as torch's own hook does: gradwire does not complete its future, nor give it up."""
    monkeypatch.setattr(hook, "is_timed", lambda step: False)

    def body(rank: Rank) -> str:
        assert rank.error() is None
        communicator = rank.state._session.communicator
        start = communicator.start
        started: list[None] = []

        def start_one(*arguments: Any, **options: Any) -> None:
            if started:
                raise ValueError("planted in the second bucket")
            started.append(start(*arguments, **options))

        communicator.start = start_one
        return str(rank.error())

    assert on_ranks("ab", body, plan="flat") == ["planted in the second bucket"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "joined"), [("onebit", False), ("dgc", True), ("powersgd", False)])
def test_wherever_memory_ends_everybody_hears_of_it(name: str, joined: bool, full_memory: Memory) -> None:
    """One GPU a node: gradients and the compressor's state are as they were, wherever a launch has ended."""
    options: dict[str, Any] = {
        "compressor": name,
        "compressor_options": dict(OPTIONS[name]) | {"warmup_steps": 0},
        "fusion": 32.0 if joined else 0.0,
    }

    def train(allowed: int) -> bool:
        def body(rank: Rank) -> bool:
            return runs_out(rank, full_memory(ENOUGH), allowed, joined)

        went_on: list[bool] = on_ranks("ab", body, **options)
        assert went_on[0] == went_on[1]
        return went_on[0]

    allowed = 0
    while not train(allowed):
        allowed += 1 + allowed
    assert allowed > 3


ENOUGH = 1 << 40


def runs_out(rank: Rank, memory: Any, allowed: int, joined: bool) -> bool:
    """Trains while gradwire gets so many tensors on rank 1; whether it goes on."""
    assert rank.error(2) is None
    rank.together.wait()  # else a rank that is late in those steps hears of the failure in them
    named = dict(rank.model.named_parameters())
    flats = [torch.randn(named[each].numel()).to(rank.device) for (each,) in BUCKETS]
    before = [flat.cpu() for flat in flats]
    compressor = rank.state._session.compression.compressor
    state = {key: copied(value) for key, value in compressor.state_dict().items()}
    reduced, end_step = 0, rank.state._end_step

    def limited(call: Callable[[], object]) -> None:
        nonlocal allowed
        memory.allowed = allowed if rank.rank == 1 else ENOUGH
        try:
            call()
        finally:
            allowed, memory.allowed = memory.allowed, ENOUGH

    def backward() -> None:
        nonlocal reduced
        for number, ((each,), flat) in enumerate(zip(BUCKETS, flats, strict=True)):
            bucket = HandedBucket(number, flat, [named[each]], number == len(BUCKETS) - 1)
            limited(partial(rank.state.reduce, bucket))
            reduced += rank.state._backward._error is None

    rank.state._end_step = lambda: limited(end_step)
    try:
        with memory:
            in_backward(backward)
    except (torch.OutOfMemoryError, CollectiveError) as error:
        assert rank.rank == 0 or isinstance(error, torch.OutOfMemoryError)
        intact = [torch.equal(flat.cpu(), copy) for flat, copy in zip(flats, before, strict=True)]
        if rank.rank == 1 and joined:
            assert all(intact) or reduced == len(BUCKETS)
        elif rank.rank == 1 and reduced < len(BUCKETS):
            assert intact[reduced]
        after = compressor.state_dict()
        if rank.rank == 1 and reduced < len(BUCKETS):
            assert state.keys() == after.keys()
            assert all(same(state[key], copied(after[key])) for key in state)
    rank.state._end_step = end_step
    torch.cuda.synchronize()
    last = rank.error(3)
    own = (CollectiveError, torch.OutOfMemoryError) if rank.rank == 1 else CollectiveError
    assert last is None or (isinstance(last, own) and "no memory left" in str(last))
    return last is None


def copied(value: object) -> object:
    return value.cpu().clone() if isinstance(value, Tensor) else value


def same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
