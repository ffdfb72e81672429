"""Laws of the executor: whatever fails, and whenever it is closed, every launch ends and every future is completed."""

import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.failure_reporter import CollectiveError
from gradwire.comms.lanes import Lane
from gradwire.comms.plan.plan import ALL_REDUCE, Phase, Plan, Transfer
from gradwire.comms.plan.rank_plans import Chunk, PhasePart, RankPlan
from gradwire.comms.run.all_reduces import AllReduce, Bucket, FutureTensor, Pool, finish
from gradwire.comms.run.lane_executor import LaneExecutor, _ChunkJob
from gradwire.comms.transport.works import Done
from gradwire.topology.cluster import Link
from support.simulate import two_level_cluster

SECONDS = 20.0
CLUSTER = two_level_cluster([0], Link(4e-6, 5e9), Link(30e-6, 25e6))


class Gate:
    """A work that is done, or fails, when it is opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.error = error

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(SECONDS)
        if self.error is not None:
            raise self.error


class Doubling:
    """In place of a transport of two ranks with equal tensors; `script` gives the works of the first collectives."""

    def __init__(self) -> None:
        self.script: list[Gate | Exception] = []

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Gate | Done:
        step = self.script.pop(0) if self.script else Done()
        if isinstance(step, Exception):
            raise step
        tensor.mul_(2 * scale)
        return step


class Transports(dict[tuple[Lane, tuple[int, ...]], Doubling]):
    """In place of the groups."""

    def __missing__(self, key: tuple[Lane, tuple[int, ...]]) -> Doubling:
        self[key] = Doubling()
        return self[key]

    def abort(self, reason: str) -> None: ...


class FailureReporter:
    """Stands in for a failure reporter: asks no other rank."""

    rank = 0

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False
        self.warned: list[str] = []

    def signal_abort(self, reason: str) -> None:
        self.warned.append(reason)

    def diagnose(
        self, error: BaseException, phase: str, members: tuple[int, ...], *, launches: int, waiting: bool
    ) -> CollectiveError:
        self.asked += 1
        time.sleep(0.02)  # so that a second lane may fail meanwhile
        if self.broken:
            raise KeyError("no such word")
        return CollectiveError(f"{phase} failed: {error}", ())


class Rig:
    """An executor on transports that do what a test says."""

    def __init__(self) -> None:
        self.groups = Transports()
        self.reporter = FailureReporter()
        self.executor = LaneExecutor("test", self.groups, 0, CLUSTER, None, self.reporter)  # type: ignore[arg-type]

    def script(self, *steps: Gate | Exception) -> None:
        """What the first collectives of the first phase do."""
        self.groups[(0, 0), (0,)].script += steps

    def start(self, launch: AllReduce, chunks: int = 1) -> None:
        numel = sum(part.numel() for part in launch.parts)
        self.executor.start(launch, rank_plan(numel, chunks), 1.0, False)

    def all_reduce(self, flat: Tensor, chunks: int = 1) -> FutureTensor:
        bucket = Bucket.of(flat)
        self.start(AllReduce((flat,), None, (bucket,)), chunks)
        return bucket.result()


def rank_plan(numel: int, chunks: int) -> RankPlan:
    """Two phases, both asynchronous."""
    phase = Phase(ALL_REDUCE, 0, asynchronous=True)
    cuts = [numel * number // chunks for number in range(chunks + 1)]
    parts = [
        PhasePart(phase, ((Transfer(ALL_REDUCE, 0, (0,), start, stop, ()),),), (), (), True, 1, stop - start, 0.0)
        for start, stop in pairwise(cuts)
    ]
    return RankPlan(
        Plan("flat", (phase, phase), chunks, 4 * numel, 0.0, {}, ""),
        tuple(Chunk(start, stop, (part, part)) for (start, stop), part in zip(pairwise(cuts), parts, strict=True)),
        ((0, 0), (1, 0), (2, 0)),
        turn=2,
        direct=False,
    )


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    made = Rig()
    yield made
    made.executor.close()
    assert not any(thread.is_alive() for thread in made.executor._threads.values())
    assert died == []


def test_close_waits_for_what_is_under_way(rig: Rig) -> None:
    gates = [Gate(), Gate()]
    rig.script(*gates)
    futures = [rig.all_reduce(torch.ones(4)) for _ in gates]
    assert gates[0].reached.wait(SECONDS)
    closing = threading.Thread(target=rig.executor.close)
    closing.start()
    while True:  # until it refuses
        try:
            rig.executor._lanes.submit(_ChunkJob(iter(())))
        except RuntimeError:
            break
    for gate in gates:
        gate.opened.set()
    closing.join(SECONDS)
    for future in futures:
        assert torch.equal(future.wait(), torch.full((4,), 4.0))


def test_close_gives_up_what_does_not_end(rig: Rig) -> None:
    gate = Gate()
    rig.script(gate)
    futures = [rig.all_reduce(torch.ones(4)) for _ in range(3)]
    rig.executor.close(0.01)
    for future in futures:
        with pytest.raises(RuntimeError, match="closed on rank 0 while an all-reduce was in flight"):
            future.wait()
    gate.opened.set()
    assert rig.reporter.asked == 0
    assert rig.reporter.warned == ["gradwire was closed on rank 0 while an all-reduce was in flight"]


def test_lanes_keep_denormals_where_the_program_flushes_them(rig: Rig) -> None:
    """Each rank decodes for itself: one that flushes would drift apart from the others."""
    smallest = 1e-44
    flat = torch.full((4,), smallest)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        found = rig.all_reduce(flat).wait()
    finally:
        torch.set_flush_denormal(False)
    assert found.tolist() == pytest.approx([4 * smallest] * 4, rel=0.2, abs=0.0)


def test_close_wakes_lanes_that_wait_for_others(rig: Rig) -> None:
    gate = Gate(RuntimeError("given up"))
    rig.groups.abort = lambda reason: gate.opened.set()  # type: ignore[method-assign]
    rig.script(gate)
    future = rig.all_reduce(torch.ones(4))
    assert gate.reached.wait(SECONDS)
    rig.executor.close(0.01)
    assert rig.executor.has_ended
    with pytest.raises(RuntimeError, match="closed on rank 0"):
        future.wait()


def test_a_chunk_that_fails_ends_its_launch_while_others_are_under_way(rig: Rig) -> None:
    gate, pool = Gate(), Pool()
    rig.script(gate, RuntimeError("the wire is cut"))
    bucket = Bucket.of(torch.ones(6))
    memory = pool.take(6, bucket.flat)
    pool.give_back(memory)
    rig.start(AllReduce([bucket.flat[:2], bucket.flat[2:]], None, (bucket,), pool), chunks=2)
    with pytest.raises(RuntimeError, match="all_reduce intra_node failed: the wire is cut"):
        bucket.result().wait()
    assert torch.equal(bucket.flat, torch.ones(6))
    gate.opened.set()
    with pytest.raises(RuntimeError, match="the wire is cut"):
        rig.all_reduce(torch.ones(3)).wait()
    assert pool.take(6, bucket.flat).data_ptr() != memory.data_ptr()  # the first chunk may have written to it
    assert rig.reporter.asked == 1


@pytest.mark.parametrize("when", ["issued", "awaited"])
@pytest.mark.parametrize("first_is_asynchronous", [True, False])
def test_an_error_names_the_phase_that_failed(rig: Rig, when: str, first_is_asynchronous: bool) -> None:
    """Whichever lane the job is in: it issues a phase in the lane of the one before, and waits in that of the next."""
    error = RuntimeError("the wire is cut")
    gate = Gate(error)
    gate.opened.set()
    rig.groups = Transports()
    inside = Phase(ALL_REDUCE, 0, asynchronous=first_is_asynchronous)
    between = Phase(ALL_REDUCE, 1, asynchronous=True)
    step = ((Transfer(ALL_REDUCE, 0, (0,), 0, 4, ()),),)
    parts = tuple(PhasePart(phase, step, (), (), True, 1, 4, 0.0) for phase in (inside, between, inside))
    plan = Plan("flat", (inside, between, inside), 1, 16, 0.0, {}, "")
    planned = RankPlan(plan, (Chunk(0, 4, parts),), ((0, 0), (1, 0), (2, 0), (3, 0)), turn=3, direct=False)
    lane = (1, 0) if first_is_asynchronous else (0, 0)
    rig.groups[lane, (0,)].script += [error if when == "issued" else gate]
    if not first_is_asynchronous:
        rig.groups[lane, (0,)].script.insert(0, Done())  # type: ignore[arg-type]
    executor = LaneExecutor("test", rig.groups, 0, CLUSTER, None, rig.reporter)  # type: ignore[arg-type]
    bucket = Bucket.of(torch.ones(4))
    executor.start(AllReduce((bucket.flat,), None, (bucket,)), planned, 1.0, False)
    with pytest.raises(RuntimeError, match="all_reduce inter_node failed: the wire is cut"):
        bucket.result().wait()
    executor.close()


def test_a_bucket_in_pieces_waits_for_all_of_them_and_takes_the_error_of_one(rig: Rig) -> None:
    gate = Gate()
    rig.script(gate, RuntimeError("the wire is cut"))
    bucket = Bucket.of(torch.ones(6))
    bucket.pending = 2
    for start in (0, 3):
        rig.start(AllReduce((bucket.flat[start : start + 3],), None, (bucket,)))
    with pytest.raises(RuntimeError, match="the wire is cut"):
        rig.all_reduce(torch.ones(3)).wait()  # behind the piece that fails
    assert bucket.future is not None and not bucket.future.done()
    gate.opened.set()
    with pytest.raises(RuntimeError, match="the wire is cut"):
        bucket.result().wait()


def test_lanes_that_fail_together_ask_the_other_ranks_once(rig: Rig) -> None:
    gate = Gate(RuntimeError("first"))
    rig.script(gate, RuntimeError("second"))
    futures = [rig.all_reduce(torch.ones(3)) for _ in range(2)]
    gate.opened.set()
    texts = []
    for future in futures:
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        texts.append(str(caught.value))
    assert rig.reporter.asked == 1
    assert len(set(texts)) == 1


def test_a_failure_is_heard_of_even_where_asking_fails(rig: Rig) -> None:
    rig.reporter.broken = True
    rig.script(RuntimeError("the wire is cut"))
    with pytest.raises(RuntimeError, match=r"the wire is cut\), and asking the other ranks failed too \(KeyError"):
        rig.all_reduce(torch.ones(3)).wait()


def test_averages_that_cannot_be_copied_back_are_an_error_of_the_bucket() -> None:
    bucket = Bucket.of(torch.ones(3))
    finish(AllReduce([bucket.flat[:1], bucket.flat[1:]], None, (bucket,)), torch.ones(4), None, None)
    with pytest.raises(RuntimeError, match="size"):
        bucket.result().wait()


def test_a_bucket_that_has_ended_is_not_kept_alive(rig: Rig) -> None:
    flat = torch.ones(3)
    gone = weakref.ref(flat)
    assert rig.all_reduce(flat).wait() is flat
    del flat
    deadline = time.monotonic() + SECONDS
    while gone() is not None and time.monotonic() < deadline:  # the lane's thread has yet to reach its next wait
        time.sleep(0.001)
    assert gone() is None
