"""Streams are a law: the exact hook has no race, reuses no memory early, and makes the host wait for nothing."""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.drive import (
    FIRST,
    REBUILT,
    SHAPES,
    TIMEOUT,
    Job,
    Model,
    first_module,
    gradient,
    make_state,
    on_cpu,
    on_cuda,
    train,
)
from fake_cuda.machine import Machine, machine
from fake_cuda.ranks import FakeProcessGroup
from fake_cuda.streams import side_stream
from gradwire.comms.step.listeners import CUTS

STEPS = (FIRST, REBUILT, REBUILT)
PLANS = [
    (plan, nodes, chunks)
    for plan, nodes in (("flat", "aabb"), ("hierarchical", "aabb"), ("leader", "aabb"), ("hierarchical", "aaab"))
    for chunks in (1, 3)
]


def averages(nodes: str, buckets: Any = STEPS) -> list[list[Tensor]]:
    """What every rank must have: of whole numbers, by a power of two of ranks, there is one answer."""
    wanted = []
    for step, names in enumerate(buckets):
        each = [gradient(rank, step, whole=True) for rank in range(len(nodes))]
        sums = {name: torch.stack([one[name] for one in each]).sum(0).view(-1) / len(nodes) for name in SHAPES}
        wanted.append([torch.cat([sums[name] for name in bucket]) for bucket in names])
    return wanted


def assert_equal(results: list[list[list[Tensor]]], wanted: list[list[Tensor]]) -> None:
    for rank in results:
        for step, (have, want) in enumerate(zip(rank, wanted, strict=True)):
            for bucket, (one, other) in enumerate(zip(have, want, strict=True)):
                assert torch.equal(one, other), f"step {step}, bucket {bucket}"


def late_waits(running: Machine) -> int:
    return sum(wait.forbidden for wait in running.host_waits)


@pytest.mark.parametrize(("plan", "nodes", "chunks"), PLANS)
def test_every_plan(plan: str, nodes: str, chunks: int) -> None:
    body = train(nodes, STEPS, whole=True, quiet=True, plan={"name": plan, "chunks": chunks})
    results, running = on_cuda(len(nodes), body)
    assert_equal(results, averages(nodes))
    assert late_waits(running) == 0


SMALL = {"three_weight": (24, 8), "two_weight": (40,), "one_weight": (16, 9)}
LONG = ((("three_weight",), ("two_weight",), ("one_weight",)),) * 30
"""Past step 23 nothing is timed any more, and a flat bucket is issued without a stream or an event of gradwire's."""


@pytest.mark.parametrize(
    ("plan", "nodes", "chunks"), [("flat", "aabb", 1), ("hierarchical", "aabb", 1), ("hierarchical", "aab", 2)]
)
def test_thirty_steps(plan: str, nodes: str, chunks: int) -> None:
    body = train(nodes, LONG, shapes=SMALL, whole=True, quiet=True, plan={"name": plan, "chunks": chunks})
    results, _ = on_cuda(len(nodes), body)  # where timing ends, times are read for the last time, a step late
    for step, names in enumerate(LONG):
        each = [gradient(rank, step, SMALL, whole=True) for rank in range(len(nodes))]
        for bucket, (name,) in enumerate(names):
            wanted = torch.stack([one[name] for one in each]).double().mean(0).view(-1).float()
            for rank in results:
                torch.testing.assert_close(rank[step][bucket], wanted)


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_every_step_is_watched(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are issued without an event of gradwire's: a rank that hangs is to be noticed in each."""
    deadline = first_module("gradwire.comms.bootstrap.deadline").Deadline
    real, watched = deadline.watch, []

    def watch(own: Any, query: Any) -> None:
        watched.append(query)
        real(own, query)

    monkeypatch.setattr(deadline, "watch", watch)
    on_cuda(4, train("aabb", LONG, shapes=SMALL, whole=True, quiet=True, plan={"name": plan, "chunks": 1}))
    assert len(watched) >= 4 * len(LONG)


@pytest.mark.parametrize("plan", ["flat", "leader", "hierarchical"])
def test_what_torch_issues_between_steps_is_behind_every_collective(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP broadcasts the model's buffers next, on a communicator that gradwire does not know of."""
    stragglers = first_module("gradwire.comms.observe.stragglers")
    monkeypatch.setattr(stragglers, "SUMMARY_SECONDS", 0.0)
    shared, real = [], stragglers.NumberExchange

    def share(*arguments: Any) -> Any:
        shared.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(stragglers, "NumberExchange", share)
    ahead: list[str] = []

    def before(job: Job, step: int) -> None:
        device = machine().devices[job.rank]
        clock = machine().current(job.rank).clock
        sent = [entry for entry in device.schedule if entry.kind == "collective"]
        ahead.extend(f"{each.op} before step {step}" for each in sent if clock.get(each.stream, 0) < each.tick)

    on_cuda(
        4, train("aabb", LONG, before=before, shapes=SMALL, whole=True, quiet=True, plan={"name": plan, "chunks": 1})
    )
    assert len(shared) >= 4 * 2
    assert not ahead


@pytest.mark.parametrize("sums_the_map", [False, True])
def test_a_step_ends_behind_the_call_in_which_ddp_waits_for_its_map(sums_the_map: bool) -> None:
    """Only then: other steps end before it."""
    orders: dict[int, list[str]] = {}

    def noted(order: list[str], whose: str, call: Callable[[], None]) -> None:
        order.append(whose)
        call()

    def before(job: Job, step: int) -> None:
        order = orders.setdefault(job.rank, [])
        if step == 1:
            job.state._session.listeners.get("used_map")._in_every_step = sums_the_map
            for owner, name, whose in ((job.state, "_end_step", "gradwire's"), (job, "_allocate", "DDP's")):
                setattr(owner, name, partial(noted, order, whose, getattr(owner, name)))

    on_cuda(
        4, train("aabb", LONG[:2], before=before, shapes=SMALL, whole=True, plan={"name": "hierarchical", "chunks": 1})
    )
    for order in orders.values():
        assert order[-2:] == (["DDP's", "gradwire's"] if sums_the_map else ["gradwire's", "DDP's"])


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_the_same_bits_as_on_the_cpu(plan: str) -> None:
    body = train("aabb", STEPS, plan={"name": plan, "chunks": 2})
    results, _ = on_cuda(4, body)
    for have, want in zip(results, on_cpu(4, body), strict=True):
        for one, other in zip(chain(*have), chain(*want), strict=True):
            if plan == "hierarchical":
                assert torch.equal(one, other)  # between two nodes, and inside two ranks, there is one order
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fusion_mb", [0.015, 1.0])
@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_joined_buckets(plan: str, fusion_mb: float) -> None:
    body = train("aabb", STEPS, whole=True, quiet=True, plan={"name": plan, "chunks": 2}, fusion=fusion_mb)
    results, _ = on_cuda(4, body)
    assert_equal(results, averages("aabb"))


def test_few_buffers_of_joined_buckets_are_in_use() -> None:
    """The host is far ahead of the device, and the allocator counts a buffer until all streams are behind its use."""
    shapes = {f"weight{number}": (64, 256) for number in range(12)}
    joined_nbytes = 2 * 64 * 256 * 4
    peaks = []

    def body(rank: int, device: torch.device, group: Any) -> None:
        model = Model(group, device, shapes)
        plan = {"name": "hierarchical", "chunks": 1}
        state = make_state(group, model, "aabb"[rank], plan=plan, fusion=joined_nbytes / 2**20)
        reduce, held = state.reduce, []

        def measured(bucket: Any) -> Any:
            held.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            future = reduce(bucket)
            peaks.append((torch.cuda.max_memory_allocated() - held[0]) / joined_nbytes)
            return future

        job = Job(state, model, device, rank)
        names = [(name,) for name in shapes]
        try:
            job.step(names, gradient(rank, 0, shapes))  # connects
            state.reduce = measured
            job.step(names, gradient(rank, 1, shapes))
        finally:
            state.close()

    on_cuda(4, body)
    assert len(peaks) == 4 * 12
    assert 1 <= max(peaks) < 3.5


def test_cuts_that_change_between_steps() -> None:
    fusion_plan = first_module("gradwire.comms.fusion").FusionPlan
    sizes = tuple(4 * sum(torch.Size(SHAPES[name]).numel() for name in bucket) for bucket in REBUILT)
    plans = {
        1: fusion_plan(piece_nbytes=4096),
        2: fusion_plan(cuts=(2,), sizes=sizes),
        3: fusion_plan(),
    }

    def before(job: Job, step: int) -> None:
        if step in plans:
            job.state.fuse(plans[step])

    steps = (FIRST, REBUILT, REBUILT, REBUILT)
    body = train("aabb", steps, before=before, whole=True, quiet=True, plan={"name": "hierarchical", "chunks": 2})
    results, _ = on_cuda(4, body)
    assert_equal(results, averages("aabb", steps))


def test_backward_on_a_stream_of_the_user() -> None:
    inner = train("aabb", STEPS, whole=True, quiet=True, plan={"name": "hierarchical", "chunks": 2}, fusion=0.015)

    def body(rank: int, device: torch.device, group: Any) -> Any:
        stream = side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return inner(rank, device, group)

    results, _ = on_cuda(4, body)
    assert_equal(results, averages("aabb"))


def test_narrow_gradients() -> None:
    # The sum of whole numbers below 2^8 is exact in float16, in any order.
    def body(rank: int, device: torch.device, group: Any) -> list[Tensor]:
        module = first_module("gradwire.comms.communicator").Communicator
        config = first_module("gradwire.comms.config").Config(
            hostname="aabb"[rank], plan={"name": "hierarchical", "chunks": 2}
        )
        communicator = module(group.store, rank, 4, device, config, name="narrow")
        found = []
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
            flat = torch.arange(1001, device=device).remainder(7).to(dtype)
            torch.empty(1, device=device)
            found.append(communicator.all_reduce(flat).wait() + 0)
        communicator.close()
        return [each.cpu() for each in found]

    results, _ = on_cuda(4, body)
    for rank in results:
        for each in rank:
            assert torch.equal(each, (torch.arange(1001).remainder(7) * 4).to(each.dtype))


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients_have_no_race_and_the_bits_of_the_cpu(as_dense: bool) -> None:
    def body(rank: int, device: torch.device, group: Any) -> list[Tensor]:
        module = first_module("gradwire.comms.communicator").Communicator
        bucket_of = first_module("gradwire.comms.run.all_reduces").Bucket.of
        config = first_module("gradwire.comms.config").Config(hostname="aabb"[rank], plan="hierarchical")
        communicator = module(group.store, rank, 4, device, config, name="sparse")
        found = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            looked_up = torch.randint(50, (1, 12), generator=generator).to(device)
            values = torch.randn(12, 6, generator=generator).to(device)
            bucket = bucket_of(torch.sparse_coo_tensor(looked_up, values, (50, 6), check_invariants=False), index=0)
            communicator.start_sparse(bucket, as_dense=as_dense)
            found.append(bucket.future.wait().to_dense())
        communicator.close()
        return [each.cpu() for each in found]

    results, _ = on_cuda(4, body)
    for have, want in zip(results, on_cpu(4, body), strict=True):
        for one, other in zip(have, want, strict=True):
            assert torch.equal(one, other)


def test_a_bucket_may_be_reused_as_soon_as_its_future_was_waited_for() -> None:
    # DDP's buckets live on; a tensor that lives for one step shows whether everything in flight is held.
    def body(rank: int, device: torch.device, group: Any) -> list[float]:
        module = first_module("gradwire.comms.communicator").Communicator
        config = first_module("gradwire.comms.config").Config(
            hostname="aabb"[rank], plan={"name": "hierarchical", "chunks": 3}
        )
        communicator = module(group.store, rank, 4, device, config, name="short")
        sums = []
        for step in range(4):
            future = communicator.all_reduce(torch.full((999,), float(rank + step), device=device))
            torch.empty(1, device=device)
            sums.append(future.wait()[5:7].sum())
            del future
            torch.empty(1, device=device)
        communicator.close()
        return [float(each) for each in sums]

    results, _ = on_cuda(4, body)
    assert results == [[12.0, 20.0, 28.0, 36.0]] * 4


def test_what_the_schedule_says_of_a_bucket() -> None:
    _, running = on_cuda(4, train("aabb", STEPS, whole=True, plan={"name": "hierarchical", "chunks": 2}))
    for rank, entries in enumerate(running.schedule()):
        ticks: dict[int, int] = {}
        done: set[tuple[int, int]] = set()
        for entry in entries:
            assert entry["rank"] == rank
            assert entry["tick"] == ticks.get(entry["stream"], 0) + 1
            assert set(map(tuple, entry["waits"])) <= done
            ticks[entry["stream"]] = entry["tick"]
            done.add((entry["stream"], entry["tick"]))
        sent = [entry for entry in entries if entry["kind"] == "collective"]
        assert {entry["members"] for entry in sent} == {(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)}
        for communicator in {entry["communicator"] for entry in sent}:
            numbers = [entry["sequence"] for entry in sent if entry["communicator"] == communicator]
            assert all(later == earlier + 1 for earlier, later in pairwise(numbers))


def test_times_are_the_devices_and_are_read_a_step_later() -> None:
    reports: dict[int, Any] = {}

    def before(job: Job, step: int) -> None:
        if step == 29:
            reports[job.rank] = (job.state.report(), job.state._session.watch.observed())

    body = train("aabb", (REBUILT,) * 30, before=before, whole=True, plan="hierarchical", quiet=True)
    _, running = on_cuda(4, body)
    assert late_waits(running) == 0
    for report, observed in reports.values():
        assert [row.op for row in report.rows] == ["reduce_scatter", "all_reduce", "all_gather"]
        for row in report.rows:
            assert 0 < row.timed_calls < row.calls == 29 * len(REBUILT)
            assert row.seconds > 0
        assert observed.steps >= 15
        assert 0 < observed.backward_seconds < observed.step_seconds


def test_a_report_waits_for_the_times_that_it_has() -> None:
    reports: dict[int, Any] = {}

    def before(job: Job, step: int) -> None:
        if step == 3:
            reports[job.rank] = job.state.report()

    on_cuda(4, train("aabb", (REBUILT,) * 4, before=before, whole=True, plan="hierarchical"))
    for report in reports.values():
        assert all(row.timed_calls == row.calls > 0 for row in report.rows)


def test_the_search_for_cuts_looks_at_each_step_a_step_later() -> None:
    states: dict[int, Any] = {}

    def before(job: Job, step: int) -> None:
        if step == 59:
            learning = job.state._session.listeners.get(CUTS)
            states[job.rank] = (learning.finder.plan, learning._fusion.plan.cuts, learning._unread)

    body = train("aabb", (REBUILT,) * 60, before=before, whole=True, fusion="auto", quiet=True)
    _, running = on_cuda(4, body)
    assert late_waits(running) == 0
    assert len({setting for setting, _, _ in states.values()}) == 1
    for setting, cuts, unread in states.values():
        assert setting.sizes
        assert cuts == setting.cuts
        assert len(unread) == 1


def test_a_lost_rank_leaves_others_that_go_on() -> None:
    ended: list[int] = []
    config = first_module("gradwire.comms.config").Config
    hook = first_module("gradwire.comms.hook").HookState

    def body(rank: int, device: torch.device, group: FakeProcessGroup) -> list[list[Tensor]]:
        model = Model(group, device, SHAPES)
        state = hook(group, config=config(timeout=TIMEOUT, elastic=True, hostname="aabb"[rank]))
        job = Job(state, model, device, rank)
        try:
            for step, names in enumerate(STEPS):
                if rank == 3 and step == 2:
                    state._elastic.resilient_ops.membership.close(
                        orderly=False
                    )  # as the kernel closes the connections of a process
                    while len(ended) < 3:
                        time.sleep(0.01)
                    break
                job.step(names, gradient(rank, step, whole=True))
            assert rank == 3 or [each.lost for each in state.changes] == [("rank 3",)]
            return job.averages()
        finally:
            ended.append(rank)
            state.close()

    close = partial(torch.allclose, atol=1e-4)  # thirds are added, and may cancel
    (first, *others, _), _ = on_cuda(4, body)
    assert all(torch.equal(a, b) for each in others for a, b in zip(chain(*each), chain(*first), strict=True))
    for step, names in enumerate(STEPS):
        own = [gradient(rank, step, whole=True) for rank in range(4)]
        means = []
        for count in (4, 3):
            sums = {name: torch.stack([each[name] for each in own[:count]]).mean(0).view(-1) for name in SHAPES}
            means.append([torch.cat([sums[name] for name in bucket]) for bucket in names])
        found = [all(map(close, first[step], mean)) for mean in means]
        # Where nobody that is left has heard that all have a step's averages, they take them again.
        assert found in ([[True, False]], [[True, False], [False, True]], [[False, True]])[step]
