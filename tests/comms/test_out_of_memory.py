"""Law: buckets that find no memory to travel, joined, divided or compressed, keep their gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.bootstrap.failure_reporter import StoreFailureReporter
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.comms.lanes import Transition
from gradwire.comms.plan.plan import ALL_REDUCE, REDUCE_SCATTER, Phase, Plan, Transfer
from gradwire.comms.plan.rank_plans import Chunk, PhasePart, RankPlan
from gradwire.comms.run import programs
from gradwire.comms.run.all_reduces import AllReduce, Bucket, RunningAllReduce, pack
from gradwire.comms.run.executor import Executor
from gradwire.comms.run.lane_executor import LaneExecutor
from gradwire.comms.transport.echo import EchoGroup
from gradwire.comms.transport.groups import Groups
from gradwire.compressors.base import Compressor, Layout, Slice
from gradwire.compressors.composite import make_composite
from gradwire.compressors.registry import Option
from gradwire.topology.cluster import Link
from support.simulate import two_level_cluster

Memory = Callable[[int], AbstractContextManager[object]]
SIZE = 3
LAYOUT = Layout(
    (
        Slice("a.weight", (60, 50), 0, 0, 3000),
        Slice("a.bias", (37,), 0, 3000, 37),
        Slice("b.weight", (50, 40), 0, 3037, 2000),
    )
)
COMPRESSORS: dict[str, dict[str, Option]] = {
    "fp16": {},
    "int4": {},
    "onebit": {"warmup_steps": 0},
    "dgc": {"warmup_steps": 0, "density": 0.05},
    "powersgd": {"warmup_steps": 0, "factor_dtype": "bfloat16"},
}


def no_memory(*sizes: object, **options: object) -> Tensor:
    raise torch.OutOfMemoryError("no memory left")


def randn(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def test_joined_buckets_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = Fusion(FusionPlan(threshold_nbytes=1 << 30))
    flats = [torch.randn(numel) for numel in (100, 7, 33)]
    before = [flat.clone() for flat in flats]
    for flat in flats:
        assert not fusion.add(Bucket.of(flat))
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pack(*fusion.end_step())
    assert all(torch.equal(flat, copy) for flat, copy in zip(flats, before, strict=True))


CLUSTER = two_level_cluster([0], Link(4e-6, 5e9), Link(30e-6, 25e6))


def an_executor(groups: Groups, compressor: Compressor | None = None) -> Executor:
    reporter = StoreFailureReporter(HashStore(), 0, 1)
    return LaneExecutor("test", groups, 0, CLUSTER, compressor, reporter)


def run_of(
    flat: Tensor, phase: Phase, transfer: Transfer, layouts: tuple[Layout, ...], flush: bool
) -> tuple[RunningAllReduce, Chunk]:
    """One chunk with one phase, in which this rank takes part with one transfer."""
    part = PhasePart(phase, ((transfer,),), layouts, ((),) * len(layouts), True, 1, flat.numel(), 0.0)
    chunk = Chunk(0, flat.numel(), (part,))
    plan = Plan("flat", (phase,), 1, flat.nbytes, 0.0, {}, "")
    launch = AllReduce((flat,), None, (Bucket.of(flat),))
    rank_plan = RankPlan(plan, (chunk,), ((0, 0), (1, 0)), turn=1, direct=False)
    return RunningAllReduce(launch, flat, rank_plan, 1 / SIZE, flush, 1), chunk


@pytest.fixture
def executor() -> Iterator[Executor]:
    """One rank that talks to itself through gloo."""
    second = timedelta(seconds=20)
    groups = Groups(
        PollingStore(HashStore(), second), 0, torch.device("cpu"), lambda members: False, "gloo", second, lambda: None
    )
    yield an_executor(groups)
    groups.close()


@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_divided_once_it_has_its_buffers(
    executor: Executor, op: str, dtype: torch.dtype, full_memory: Memory
) -> None:
    numel, gradient = 100, randn(100).to(dtype)
    transfer = Transfer(op, 0, (0,), 0, numel, () if op == ALL_REDUCE else (0, numel))

    def run_chunk(flat: Tensor) -> Iterator[Transition]:
        return executor.run_chunk(*run_of(flat, Phase(op, 0, asynchronous=True), transfer, (), False))

    def wait(transition: Transition) -> None:
        for work in transition.works:
            work.wait()

    for transition in run_chunk(gradient.clone()):  # connects
        wait(transition)
    flat, allowed, rounds = gradient.clone(), 0, None
    while rounds is None:
        try:
            with full_memory(allowed):
                transition = next(rounds := run_chunk(flat))
        except torch.OutOfMemoryError:
            assert torch.equal(flat, gradient), f"changed before allocation {allowed + 1}"
            rounds, allowed = None, allowed + 1
    assert allowed > 0 or op == ALL_REDUCE
    for last in (transition, *rounds):
        wait(last)
    assert torch.equal(flat, gradient * (1 / 3))


class Echoes(dict[object, EchoGroup]):
    """In place of the groups: everybody else says the same as this rank."""

    def __missing__(self, key: object) -> EchoGroup:
        return EchoGroup(SIZE)


def average(compressor: Compressor, flat: Tensor, flush: bool) -> None:
    phase = Phase(ALL_REDUCE, 0, compressor=compressor.name)
    transfer = Transfer(ALL_REDUCE, 0, tuple(range(SIZE)), 0, flat.numel(), ())
    executor = an_executor(Echoes(), compressor)  # type: ignore[arg-type]
    for transition in executor.run_chunk(*run_of(flat, phase, transfer, (LAYOUT,), flush)):
        for work in transition.works:
            work.wait()


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("flush", [False, True])
def test_a_compressed_bucket_survives_to_the_end(
    name: str, flush: bool, full_memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever memory ends, also after some collectives: all compressors of a bucket or none."""
    gradient = randn(LAYOUT.numel)

    def run(flat: Tensor, memory: AbstractContextManager[object]) -> bool:
        compressor = make_composite(name, COMPRESSORS[name])
        average(compressor, gradient.clone(), False)
        compressor.end_step(True)  # so that there are residuals
        try:
            with memory:
                average(compressor, flat, flush)
        except torch.OutOfMemoryError:
            return False
        return True

    wanted = gradient.clone()
    assert run(wanted, nullcontext())
    monkeypatch.setattr(programs, "OVERCOMMITTING", ())
    flat, allowed = gradient.clone(), 0
    while not run(flat, full_memory(allowed)):
        assert torch.equal(flat, gradient), f"changed before allocation {allowed + 1}"
        allowed += 1
    assert allowed > 1
    assert torch.equal(flat, wanted)
