"""Laws of the NCCL transport without a GPU: every collective is the sum, in as few native calls as can be, in place."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms import streams
from gradwire.comms.bootstrap import compat
from gradwire.comms.bootstrap.compat import HashStore, PrefixStore
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.errors import PeerError
from gradwire.comms.plan.rank_plans import RankPlans
from gradwire.comms.plan.schedule import ALIGN_NUMEL, equal_partition
from gradwire.comms.run.programs import issue_together
from gradwire.comms.transport import launch_order, nccl
from gradwire.comms.transport.groups import Groups
from gradwire.comms.transport.nccl import (
    INTER_NODE_CTAS,
    NcclGroups,
    NcclTransport,
    describe_ranks,
    equal_slices,
    multiplies_exactly,
)
from gradwire.comms.transport.works import Done
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, even_bounds
from gradwire.compressors.registry import make
from gradwire.topology.cluster import Cluster, GpuFabric, Level, Link, uniform_cluster
from support.nccl import FakeNccl, FakeNcclWorld, NoAllocation
from support.simulate import two_level_cluster
from support.threads import run_ranks

SIZES = (1, 2, 3, 5, 8)
SUMMED = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.complex64)
DEVICE = torch.device("cuda", 0)
LINKS = (Link(4e-6, 200e9), Link(30e-6, 25e9))
CLUSTERS = {
    "2x4": two_level_cluster([0] * 4 + [1] * 4, *LINKS),
    "3+5": two_level_cluster([0, 0, 0, 1, 1, 1, 1, 1], *LINKS),
    "1+3+4": two_level_cluster([0, 1, 1, 1, 2, 2, 2, 2], *LINKS),
    "mixed": two_level_cluster([0, 1, 2, 0, 0, 1], *LINKS),
    "4x1": two_level_cluster([0, 1, 2, 3], *LINKS),
    "1x4": two_level_cluster([0, 0, 0, 0], *LINKS),
    "three levels": uniform_cluster((2, 3, 2), [Level(name, LINKS[0]) for name in ("a", "b", "c")]),
}


def partitions(numel: int, size: int) -> dict[str, tuple[int, ...]]:
    """What plans and compressors make of a region."""
    middle = even_bounds(numel, size - 2) if size > 2 else (0,) * (size - 1)
    return {
        "equal": equal_partition(0, numel, size),
        "even": even_bounds(numel, size, 4),
        "matrices": (0, *(numel * (rank * rank) // (size * size) for rank in range(1, size)), numel),
        "holes": (0, *middle, numel),
        "leader": (0, *([numel] * size)),
    }


def inputs(size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Small multiples of 12: sums and what the factors make of them are exact, or alike, in every dtype."""
    return [
        (torch.arange(numel).add(rank).remainder(5) * (1 if dtype == torch.uint8 else 12)).to(dtype)
        for rank in range(size)
    ]


def scales(dtype: torch.dtype, size: int) -> tuple[float, ...]:
    return (1.0, 1.0 / size, 0.25, 1.0 / (3 * size)) if dtype.is_floating_point or dtype.is_complex else (1.0,)


@cache
def inputs_and_total(size: int, numel: int, dtype: torch.dtype, scale: float) -> tuple[list[Tensor], Tensor]:
    """Made once for all ranks, which read it."""
    given = inputs(size, numel, dtype)
    return given, total(given, scale)


def total(given: list[Tensor], scale: float) -> Tensor:
    exact = sum(each.to(torch.complex128 if each.is_complex() else torch.float64) for each in given)
    assert isinstance(exact, Tensor)
    return (exact * scale).to(given[0].dtype)


def assert_sums(found: Tensor, wanted: Tensor) -> None:
    loose = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(wanted.dtype, 1e-6)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=loose, atol=0.0 if loose < 1e-3 else 1e-2), (found, wanted)


def test_one_rank_multiplies_by_itself() -> None:
    """Torch's reduce-scatter of one rank is a copy: a factor that is left to NCCL would be lost."""
    (backend,) = FakeNcclWorld(1).backends()
    transport = NcclTransport(backend, 0, 1)
    scattered, reduced = torch.full((2, 4), 8.0).unbind()
    transport.reduce_scatter(scattered, (0, 4), 0.25).wait()
    transport.all_reduce(reduced, 0.25).wait()
    assert scattered.tolist() == reduced.tolist() == [2.0] * 4
    assert [note[-1] for launch in backend.launches for note in launch] == ["SUM", "SUM"]


@pytest.mark.parametrize("size", SIZES[1:])
def test_slices_are_the_sum_in_one_launch_and_without_memory(size: int) -> None:
    backends = FakeNcclWorld(size).backends()

    def body(rank: int) -> None:
        transport = NcclTransport(backends[rank], rank, size)
        turn = count()
        for numel in range(201):
            equal, *others = partitions(numel, size).items()
            for kind, bounds in (equal, others[numel % len(others)]):  # each size with one of the others
                number = next(turn)
                dtype = SUMMED[number % len(SUMMED)]
                options = scales(dtype, size)
                scale = options[number // len(SUMMED) % len(options)]
                given, wanted = inputs_and_total(size, numel, dtype, scale)
                flat = given[rank].clone()
                before = len(backends[rank].launches)
                with NoAllocation():
                    transport.reduce_scatter(flat, bounds, scale).wait()
                own = slice(bounds[rank], bounds[rank + 1])
                assert_sums(flat[own], wanted[own])
                flat[: own.start], flat[own.stop :] = 0, 0  # is undefined
                with NoAllocation():
                    transport.all_gather_slices(flat, bounds).wait()
                assert_sums(flat, wanted)
                launches = backends[rank].launches[before:]
                assert len(launches) == (2 if numel else 0), "one launch each"
                for launch, native, single in zip(
                    launches, ("reduce_scatter", "all_gather"), ("reduce", "broadcast"), strict=False
                ):
                    names = [call[0] for call in launch]
                    if kind == "equal":
                        assert names in ([native], [native, single], [single])
                        assert native in names or numel < size * ALIGN_NUMEL
                        assert sum(call[2] for call in launch[names.count(native) :]) < 2 * size * ALIGN_NUMEL
                    elif native not in names:
                        assert names == [single] * sum(stop > start for start, stop in pairwise(bounds))

    run_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_multiplies_as_it_sums(size: int) -> None:
    backends = FakeNcclWorld(size).backends()

    def body(rank: int) -> None:
        transport = NcclTransport(backends[rank], rank, size)
        for numel in (0, 1, 7, 64, 200):
            for dtype in SUMMED:
                for scale in scales(dtype, size):
                    given, wanted = inputs_and_total(size, numel, dtype, scale)
                    flat = given[rank].clone()
                    with NoAllocation():
                        transport.all_reduce(flat, scale).wait()
                    assert_sums(flat, wanted)
                    ((_, _, _, real, operation),) = backends[rank].launches[-1]
                    if scale == 1.0 or size == 1:
                        assert operation == "SUM"
                    elif real in (torch.float32, torch.float64):
                        assert operation == ("AVG" if scale == 1.0 / size else "PREMUL_SUM")
                    elif operation != "SUM":
                        assert multiplies_exactly(real, scale)

    run_ranks(size, body)


def test_a_factor_that_a_narrow_dtype_rounds_is_not_multiplied_by_nccl() -> None:
    assert multiplies_exactly(torch.bfloat16, 1 / 8)
    assert not multiplies_exactly(torch.bfloat16, 1 / 6)
    assert multiplies_exactly(torch.float32, 1 / 6)
    assert not multiplies_exactly(torch.int64, 0.5)
    if hasattr(torch._C._distributed_c10d, "_make_nccl_premul_sum"):
        assert compat.premultiplied_sum(0.125).__getstate__() == (dist.ReduceOp.PREMUL_SUM, 0.125)


@pytest.mark.parametrize("size", SIZES)
def test_exchanges_and_broadcasts_move_every_element(size: int) -> None:
    backends = FakeNcclWorld(size).backends()

    def body(rank: int) -> None:
        transport = NcclTransport(backends[rank], rank, size)
        for numel in (0, 1, 13, 64):
            source = torch.arange(size * numel) + 1000 * rank
            output = torch.zeros_like(source)
            gathered = torch.zeros(size, size * numel, dtype=source.dtype)
            with NoAllocation():
                transport.all_to_all(output, source).wait()
                transport.all_gather(gathered, source).wait()
            everybody = [torch.arange(size * numel) + 1000 * other for other in range(size)]
            assert torch.equal(
                output, torch.cat([each.view(size, -1)[rank] for each in everybody]) if numel else output
            )
            assert torch.equal(gathered, torch.stack(everybody))
            for root in range(size):
                copied = source.to(torch.complex64)
                with NoAllocation():
                    transport.broadcast(copied, root).wait()
                assert torch.equal(copied, everybody[root].to(torch.complex64))

    run_ranks(size, body)


def requests(rank: int, size: int) -> tuple[Collective, ...]:
    summed = torch.full((6,), float(rank + 1))
    source = torch.arange(2 * size, dtype=torch.uint8) + 10 * rank
    return (
        Collective(ALL_REDUCE, (summed,)),
        Collective(ALL_TO_ALL, (torch.zeros_like(source), source)),
        Collective(ALL_GATHER, (torch.zeros(size * 3), torch.full((3,), float(rank)))),
    )


def check(asked: tuple[Collective, ...], rank: int, size: int) -> None:
    assert asked[0].tensors[0].tolist() == [size * (size + 1) / 2] * 6
    wanted = [2 * rank + place + 10 * other for other in range(size) for place in range(2)]
    assert asked[1].tensors[0].tolist() == wanted
    assert asked[2].tensors[0].tolist() == [float(other) for other in range(size) for _ in range(3)]


@pytest.mark.parametrize("group_calls", [True, False])
def test_collectives_are_issued_together(group_calls: bool) -> None:
    size = 3
    backends = FakeNcclWorld(size).backends()

    def body(rank: int) -> None:
        transport = NcclTransport(backends[rank], rank, size, group_calls=group_calls)
        asked = requests(rank, size)
        with NoAllocation():
            issue_together(transport, asked).wait()
        check(asked, rank, size)
        issue_together(transport, ()).wait()

    run_ranks(size, body)
    names = [[call[0] for call in launch] for launch in backends[0].launches]
    together = ["allreduce", "all_to_all", "all_gather"]
    assert names == ([together] if group_calls else [[name] for name in together])
    with pytest.raises(ValueError, match="`collectives` holds 'gather' of 1 tensors"):
        issue_together(NcclTransport(backends[0], 0, size), 2 * [Collective("gather", (torch.zeros(1),))])
    assert not backends[0].is_in_group_call


def test_elsewhere_they_are_issued_one_after_the_other() -> None:
    asked: list[str] = []

    class Other:
        rank, size = 0, 1

        def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Done:
            asked.append("all_reduce")
            return Done()

        def all_gather(self, output: Tensor, source: Tensor) -> Done:
            asked.append("all_gather")
            return Done()

    one, other = Collective(ALL_REDUCE, (torch.zeros(1),)), Collective(ALL_GATHER, (torch.zeros(1), torch.zeros(1)))
    issue_together(Other(), [one, other]).wait()  # type: ignore[arg-type]
    assert asked == ["all_reduce", "all_gather"]


def until(condition: Callable[[], bool]) -> None:
    """Waits for a thread's deed; a time-out is a failure, and no verdict hangs on how long it takes."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_group_call_that_fails_is_ended_and_gives_the_communicator_up() -> None:
    (backend,) = FakeNcclWorld(1).backends()
    backend.fails = "broadcast"
    transport = NcclTransport(backend, 0, 1)
    with pytest.raises(RuntimeError, match="NCCL error: broadcast failed"):
        calls = transport._calls
        transport._issue([calls.all_reduce(torch.zeros(1), 1.0), calls.broadcast(torch.zeros(2), 0)])
    assert not backend.is_in_group_call, "this thread's next calls would be held back"
    until(lambda: backend.aborts == 1)
    with pytest.raises(PeerError, match="a group call of NCCL failed on this rank"):
        transport.all_reduce(torch.zeros(1))
    transport.close()
    assert backend.shutdowns == 0


def test_close_never_calls_torchs_shutdown() -> None:
    """In it NCCL waits for the other ranks under a lock that `abort` needs, too: nothing would end it."""
    first, second = (FakeNcclWorld(1).backends()[0] for _ in range(2))
    done, under_way = NcclTransport(first, 0, 1), NcclTransport(second, 0, 1)
    second.holds = True
    for transport in (done, under_way):
        transport.all_reduce(torch.zeros(4)).wait()
    assert done.is_done()
    assert not under_way.is_done()
    done.close(0.0)
    under_way.close(0.0)
    until(lambda: first.aborts == second.aborts == 1)
    assert first.shutdowns == second.shutdowns == 0


def test_nobody_lets_go_before_all_are_through() -> None:
    """A rank's memory is read by the others' kernels until theirs have ended."""
    store, backends = HashStore(), FakeNcclWorld(2).backends()
    first, second = (NcclTransport(backend, rank, 2) for rank, backend in enumerate(backends))
    meeting = PollingStore(store, timedelta(seconds=5))
    leaving = threading.Thread(target=first.close, args=(30.0, meeting))
    leaving.start()
    until(lambda: store.check(["through"]))
    time.sleep(3 * nccl.FINISHED_POLL_SECONDS)
    assert backends[0].aborts == 0
    second.close(30.0, meeting)
    leaving.join(20)
    assert backends[0].aborts == backends[1].aborts == 1


def test_who_never_comes_to_the_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    (backend,) = FakeNcclWorld(1).backends()
    NcclTransport(backend, 0, 2).close(0.1, PollingStore(HashStore(), timedelta(seconds=5)))
    assert backend.aborts == 1
    assert not caplog.records


def test_a_work_is_not_asked_while_its_communicator_is_given_up() -> None:
    """torch answers under a lock that the abort holds, and keeps the GIL: everything would stand still."""
    (backend,) = FakeNcclWorld(1).backends()
    released = threading.Event()
    transport = NcclTransport(backend, 0, 1)
    asked: list[bool] = []
    backend.abort = lambda: released.wait() and None  # type: ignore[assignment]
    work = transport.all_reduce(torch.zeros(4))
    work.is_completed = lambda: asked.append(True)  # type: ignore[attr-defined]
    transport.abort("a rank is lost")
    assert not transport.is_done()
    transport.close(0.0)
    released.set()
    assert not asked


class NeverConnects(FakeNccl):
    """NCCL's init as it is: one call, which returns when all have come, and which nothing ends."""

    def __init__(self) -> None:
        super().__init__(FakeNcclWorld(2), 0)
        self.came = threading.Event()
        self.released = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.came.set()
        self.released.wait(60)


def test_who_connects_can_be_given_up() -> None:
    backend = NeverConnects()
    transport = NcclTransport(backend, 0, 2)
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            transport.connect(DEVICE, timedelta(seconds=60))
        except PeerError as error:
            failure.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    assert backend.came.wait(20)
    transport.abort("rank 1 is lost")
    thread.join(20)
    backend.released.set()
    assert "rank 1 is lost" in str(failure[0])


def test_who_connects_gives_up_after_the_time_out() -> None:
    backend = NeverConnects()
    with pytest.raises(PeerError, match=r"2 ranks have not connected within 0\.1 s"):
        NcclTransport(backend, 0, 2).connect(DEVICE, timedelta(seconds=0.1))
    backend.released.set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_where_a_switch_sums_it_is_given_the_plain_sum(dtype: torch.dtype) -> None:
    """In-network reduction takes no other one: with AVG or PreMulSum NCCL would fall back to ring or tree."""
    size = 4
    backends = FakeNcclWorld(size).backends()

    def body(rank: int) -> None:
        transport = NcclTransport(backends[rank], rank, size, sums_in_switch=True)
        for scale in (1.0, 1.0 / size, 0.5, 1.0 / 3):
            given = inputs(size, 64, dtype)
            flat = given[rank].clone()
            transport.all_reduce(flat, scale).wait()
            assert_sums(flat, total(given, scale))
            flat = given[rank].clone()
            transport.reduce_scatter(flat, even_bounds(64, size), scale).wait()
            own = slice(16 * rank, 16 * (rank + 1))
            assert_sums(flat[own], total(given, scale)[own])
            assert {note[4] for launch in backends[rank].launches for note in launch} == {"SUM"}

    run_ranks(size, body)


def test_which_groups_a_switch_sums_for() -> None:
    fabric = GpuFabric(
        compute_capability=90,
        nvlink=True,
        nvls=True,
        ll128=True,
        amd_cpu=False,
        network="infiniband",
        network_seconds=0.0,
    )
    for name, wanted in {"2x4": (True, True, False), "1x4": (True, True, True), "4x1": (False, False, False)}.items():
        cluster = CLUSTERS[name]
        everybody = tuple(range(cluster.size))
        groups = everybody, everybody[:2], everybody[:: cluster.size // 2]
        assert not any(map(cluster.sums_in_switch, groups)), "without NVLS AVG costs nothing"
        unknown = replace(cluster, nvls_possible=True)
        assert tuple(map(unknown.sums_in_switch, groups)) == wanted, "a hidden switch gets what it can sum"
        assert tuple(map(replace(cluster, fabric=fabric).sums_in_switch, groups)) == wanted


def test_torchs_watchdog_leaves_a_users_group_to_gradwire() -> None:
    """It counts from the issue, gradwire from the end of the step; and it ends the process."""
    (backend,) = FakeNcclWorld(1).backends()
    nccl.borrow(backend, 0, 1).all_reduce(torch.zeros(4))
    assert backend.timeouts == [timedelta(minutes=10) + nccl.WATCHDOG_MARGIN]
    assert backend.options._timeout == timedelta(minutes=10)
    backend.fails = "allreduce"
    with pytest.raises(RuntimeError, match="allreduce failed"):
        nccl.borrow(backend, 0, 1).all_reduce(torch.zeros(4))
    assert backend.options._timeout == timedelta(minutes=10)


def test_a_users_group_is_never_shut_down_but_aborted_on_failure() -> None:
    (backend,) = FakeNcclWorld(1).backends()
    borrowed = nccl.borrow(backend, 0, 1)
    borrowed.close()
    assert (backend.shutdowns, backend.aborts) == (0, 0)
    borrowed.abort("a rank is lost")
    until(lambda: backend.aborts == 1)
    borrowed.close()
    assert backend.shutdowns == 0
    with pytest.raises(PeerError, match="a rank is lost"):
        borrowed.broadcast(torch.zeros(1), 0)


class Maker:
    """In place of `make_nccl`: joins the members by the name of their group, as NCCL does by its store."""

    def __init__(self) -> None:
        self.worlds: dict[str, FakeNcclWorld] = {}
        self.made: list[tuple[str, tuple[int, ...], int | None]] = []
        self.backends: list[FakeNccl] = []
        self.timeouts: list[timedelta] = []
        self._lock = threading.Lock()

    def __call__(
        self,
        store: PrefixStore,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str,
        global_ranks: Sequence[int],
        max_ctas: int | None,
    ) -> FakeNccl:
        with self._lock:
            world = self.worlds.setdefault(name, FakeNcclWorld(size))
            assert world.size == size
            self.made.append((name, tuple(global_ranks), max_ctas))
            self.backends.append(FakeNccl(world, rank))
            self.timeouts.append(timeout)
            return self.backends[-1]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    made = Maker()
    monkeypatch.setattr(nccl, "make_nccl", made)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(launch_order, "multiprocessors", lambda device: 10_000)
    monkeypatch.setattr(launch_order, "most_ctas", lambda device: 32)
    monkeypatch.setattr(nccl, "makes_group_calls", lambda backend: True)
    yield made


TIMEOUT = timedelta(seconds=300)
"""No test waits for it to pass: a busy machine may take long over a connection."""


def groups_of(rank: int, cluster: Cluster, store: HashStore, shared: NcclGroups | None = None) -> Groups:
    return Groups(
        PollingStore(store, TIMEOUT),
        rank,
        DEVICE,
        cluster.share_a_node,
        "auto",
        TIMEOUT,
        lambda: None,
        nccl_groups=shared or NcclGroups(name="hook0", size=cluster.size, between_nodes=cluster.all_apart),
    )


@pytest.mark.parametrize("plan", ["auto", "flat", "hierarchical", "leader"])
@pytest.mark.parametrize("layout", CLUSTERS)
@pytest.mark.parametrize("compressor", [None, "onebit"])
def test_what_buckets_need_is_connected_before_the_first(
    layout: str, plan: str, compressor: str | None, maker: Maker
) -> None:
    """Every rank blocks in each group until its members have come: an order with a circle would never end."""
    cluster = CLUSTERS[layout]
    config = Config(plan={"name": plan, "chunks": 2})
    made = make(compressor) if compressor else None
    store = HashStore()

    def body(rank: int) -> None:
        rank_plans = RankPlans(cluster, rank, "cuda", config, made)
        rank_plans.fix_plan(25 << 20)
        groups = groups_of(rank, cluster, store)
        groups.connect(rank_plans.groups(25 << 20), 25 << 20)
        before = set(groups)
        for numel in (1, 100, 5000, 3_000_001):
            for chunk in rank_plans.plan_for(numel, torch.float32, None).chunks:
                for part in chunk.parts:
                    for transfer in (each for step in part.steps for each in step):
                        assert ((0, 0), transfer.members) in before, "made inside backward"
        groups.close()

    run_ranks(cluster.size, body)
    for name, ranks, max_ctas in maker.made:
        assert name == f"gradwire/hook0/{describe_ranks(ranks)}"
        assert max_ctas == (INTER_NODE_CTAS if cluster.all_apart(ranks) else None)
    assert all(backend.aborts == backend.connects == 1 for backend in maker.backends)
    assert all(timeout == TIMEOUT + nccl.WATCHDOG_MARGIN for timeout in maker.timeouts), "or torch ends the process"


class NoStreams:
    """In place of the side streams, which a machine without a GPU cannot make."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE


def test_a_communicator_connects_its_groups_once(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SideStreams", NoStreams)
    store = HashStore()

    def body(rank: int) -> None:
        config = Config(hostname="one" if rank < 3 else "two", plan="hierarchical", timeout=timedelta(seconds=20))
        made = Communicator(store, rank, 5, DEVICE, config, name="hook0")
        made.connect(1 << 20)
        made.connect(1 << 10)
        made.close()

    run_ranks(5, body)
    limits = {name: max_ctas for name, _, max_ctas in maker.made}
    assert limits["gradwire/hook0/0-2"] is None
    assert limits["gradwire/hook0/3-4"] is None
    between = [name for name in limits if limits[name] == INTER_NODE_CTAS]
    assert len(limits) == 2 + len(between)
    assert between
    assert len(maker.made) == sum(backend.aborts for backend in maker.backends)


def test_the_users_own_group_serves_all_ranks(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = CLUSTERS["2x4"]
    users, store = FakeNcclWorld(8).backends(), HashStore()
    monkeypatch.setattr(torch, "zeros", lambda numel, dtype, device: torch.ones(numel, dtype=dtype))

    def body(rank: int) -> None:
        shared = NcclGroups(
            name="hook1",
            global_ranks=tuple(range(10, 90, 10)),
            size=8,
            backend=users[rank],
            between_nodes=cluster.all_apart,
        )
        groups = groups_of(rank, cluster, store, shared)
        sets = [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (3, 7)]
        groups.connect({((0, 0), members): False for members in sets}, 1 << 20)
        assert users[rank].connects == 0, "a second communicator would be made"
        groups.close()
        assert (users[rank].shutdowns, users[rank].aborts) == (0, 0)

    run_ranks(8, body)
    assert [launch[0][:3] for launch in users[0].launches] == [("allreduce", None, 1)]
    assert {(name, ranks) for name, ranks, _ in maker.made} == {
        ("gradwire/hook1/0-3", (10, 20, 30, 40)),
        ("gradwire/hook1/4-7", (50, 60, 70, 80)),
        ("gradwire/hook1/0,4", (10, 50)),
        ("gradwire/hook1/3,7", (40, 80)),
    }


def test_abort_reaches_every_group_also_one_that_connects(maker: Maker) -> None:
    groups = groups_of(0, CLUSTERS["2x4"], HashStore())
    groups.connect({((0, 0), (0,)): False}, 1 << 20)
    failure: list[BaseException] = []

    def join() -> None:
        try:
            groups.connect({((0, 0), (0, 4)): False}, 1 << 20)  # rank 4 never comes
        except BaseException as error:  # noqa: BLE001 - looked at below
            failure.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    until(lambda: len(maker.backends) == 2 and maker.backends[1].connects == 1)
    groups.abort("rank 4 is lost")
    thread.join(20)
    assert isinstance(failure[0], PeerError)
    assert "rank 4 is lost" in str(failure[0])  # else it waited for the others as long as it may
    until(lambda: all(backend.aborts == 1 for backend in maker.backends))
    with pytest.raises(PeerError, match="rank 4 is lost"):
        groups[(0, 0), (0, 1)]
    with pytest.raises(PeerError, match="rank 4 is lost"):
        groups[(0, 0), (0,)].all_reduce(torch.zeros(1))
    groups.close()
    assert all(backend.shutdowns == 0 for backend in maker.backends)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0, 1, 2, 3), "0-3"), ((0, 8, 16), "0-16/8"), ((3,), "3"), ((0, 4), "0,4"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")],
)
def test_ranks_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert describe_ranks(ranks) == text


@pytest.mark.parametrize("layout", CLUSTERS)
def test_on_cuda_exact_regions_are_equal_slices_and_aligned(layout: str) -> None:
    cluster = CLUSTERS[layout]
    even = len({len(node) for node in cluster.nodes}) == 1
    for numel in (1, 15, 16, 1000, 12_345, 6_553_600):
        for rank in range(cluster.size):
            rank_plans = RankPlans(cluster, rank, "cuda", Config(plan={"name": "hierarchical", "chunks": 3}), None)
            for chunk in rank_plans.plan_for(numel, torch.float16, None).chunks:
                for part in chunk.parts:
                    for transfer in part.steps[0]:
                        assert transfer.start % ALIGN_NUMEL == 0
                        if transfer.bounds:
                            *starts, stop = transfer.bounds
                            assert all(start % ALIGN_NUMEL == 0 for start in starts)
                            slices = equal_slices(transfer.bounds)
                            left = stop - slices * len(starts)
                            assert not even or left < len(starts) * ALIGN_NUMEL


def test_a_backend_of_another_library_is_not_borrowed() -> None:
    class Group:
        def __init__(self, name: str | None) -> None:
            self.of = name

        def _get_backend(self, device: torch.device) -> "Group":
            if self.of is None:
                raise RuntimeError("No backend type associated with device type cuda")
            return self

        def name(self) -> str:
            return str(self.of)

    for name, taken in (("nccl", True), ("nccl2", True), ("gloo", False), (None, False)):
        found = compat.nccl_backend_of(Group(name), DEVICE)  # type: ignore[arg-type]
        assert (found is not None) == taken
