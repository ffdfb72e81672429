"""Laws of the whole path of a bucket, ranks as threads: exact sums, the same bits everywhere, errors on all ranks."""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.comms.bootstrap import failure_reporter
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.plan.plan import ALL_REDUCE, Phase, Plan
from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.composite import make_composite
from support.threads import run_ranks

Result = TypeVar("Result")
NODES = {"2x2": "aabb", "2x2 round-robin": "abab", "3+1": "aaab", "1x3": "aaa", "3x1": "abc", "1x1": "a"}
CPU = torch.device("cpu")


def on_ranks(nodes: str, body: Callable[[Communicator], Result], **options: object) -> Sequence[Result]:
    """Runs `body` on one communicator a rank; a rank's node is its letter in `nodes`."""
    store = HashStore()

    def run(rank: int) -> Result:
        settings = {"timeout": timedelta(seconds=20)} | options
        config = Config(hostname=nodes[rank], **settings)  # type: ignore[arg-type]
        communicator = Communicator(store, rank, len(nodes), CPU, config, name="test")
        try:
            return body(communicator)
        finally:
            communicator.close()

    return run_ranks(len(nodes), run)


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_a_transport_that_cannot_be_is_refused_before_the_ranks_meet(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first rank would take the store along, and the others hear of that alone. Here the others never come."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    config = Config(transport=transport, timeout=timedelta(seconds=1))
    with pytest.raises((ValueError, RuntimeError), match=rf"`transport` is {transport},? but"):
        Communicator(HashStore(), 1, 2, CPU, config, name="test")


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_without_the_kernels_of_the_others_are_refused_on_all(odd: int) -> None:
    """Kernels of a GPU and torch's operators round otherwise. No rank is left to wait, whichever one lacks them."""
    store = HashStore()

    def run(rank: int) -> str:
        config, kernels = Config(timeout=timedelta(seconds=60)), "reference" if rank == odd else "cuda"
        with pytest.raises(ValueError, match="wanted the same on all ranks") as caught:
            Communicator(store, rank, 3, CPU, config, name="test", kernels=kernels)
        return str(caught.value)

    for said in run_ranks(3, run):
        assert "`kernels` are " in said and "the warning of the rank with `reference` says what to install" in said


def test_a_state_without_ranks_refuses_mpi_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"`transport` is mpi, but mpi4py .*pip install"):
        gradwire.HookState(transport="mpi")


def integers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("plan", ["flat", "hierarchical", "leader"])
def test_the_sum_is_exact_for_every_plan_dtype_and_size(nodes: str, plan: str) -> None:
    cases = [
        (dtype, numel)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
        for numel in (0, 1, 17, 5000)
    ]

    def body(communicator: Communicator) -> list[Tensor]:
        return [communicator.all_reduce(integers(communicator.rank, numel, dtype)).wait() for dtype, numel in cases]

    for results in on_ranks(nodes, body, plan={"name": plan, "chunks": 2}):
        for (dtype, numel), result in zip(cases, results, strict=True):
            expected = sum(integers(rank, numel, torch.int64) for rank in range(len(nodes)))
            assert torch.equal(result, torch.as_tensor(expected).to(dtype)), (dtype, numel)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_all_ranks_end_with_the_same_bits_in_every_run(nodes: str) -> None:
    def body(communicator: Communicator) -> Tensor:
        flat = torch.randn(40_001, generator=torch.Generator().manual_seed(communicator.rank))
        return communicator.all_reduce(flat, scale=1 / 3).wait()

    first, *others = [*on_ranks(nodes, body), *on_ranks(nodes, body)]
    assert all(torch.equal(first, other) for other in others)


def test_many_buckets_in_flight_stay_apart() -> None:
    def body(communicator: Communicator) -> list[Tensor]:
        futures = [
            communicator.all_reduce(torch.full((3000 + step,), float(step * (communicator.rank + 1))))
            for step in range(30)
        ]
        return [future.wait() for future in futures]

    for results in on_ranks("aabb", body):
        for step, result in enumerate(results):
            assert torch.equal(result, torch.full((3000 + step,), 10.0 * step))


def test_scaling_comes_before_the_sum() -> None:
    def body(communicator: Communicator) -> Tensor:
        return communicator.all_reduce(torch.full((100,), 40000.0, dtype=torch.float16), scale=1 / 4).wait()

    for result in on_ranks("aabb", body):
        assert torch.equal(result, torch.full((100,), 40000.0, dtype=torch.float16))


def test_the_report_counts_the_bytes_of_the_plan() -> None:
    def body(communicator: Communicator) -> tuple[str, dict[str, float]]:
        communicator.all_reduce(torch.ones(64_000)).wait()
        report = communicator.report()
        return report.full(), {row.level: row.wire_nbytes for row in report.rows if row.op == "all_reduce"}

    for text, sent in on_ranks("aabb", body, plan="hierarchical"):
        assert "links: 40 Gbit/s intra_node (assumed), 10 Gbit/s inter_node (assumed);" in text
        assert '`nic_bytes_per_second="measure"` measures them' in text
        assert "2 nodes x 2 ranks" in text
        assert "hierarchical" in text
        assert sent == {"inter_node": 128_000}  # half the bucket is this rank's shard; a ring of two sends it once


def test_another_configuration_is_refused_on_all_ranks() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname="a", plan="flat" if rank else "auto", timeout=timedelta(seconds=10))
        with pytest.raises(ValueError, match="`plan` is") as caught:
            Communicator(store, rank, 2, CPU, config, name="test")
        return str(caught.value)

    assert all("'flat' on rank 1" in text for text in run_ranks(2, run))


def test_another_world_size_is_refused() -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname="a", timeout=timedelta(seconds=10))
        with pytest.raises(ValueError, match="`world_size` is") as caught:
            Communicator(store, rank, 2 + rank, CPU, config, name="test")
        return str(caught.value)

    assert all("3 on rank 1" in text and "2 on rank 0" in text for text in run_ranks(2, run))


def test_a_rank_that_never_comes_is_named() -> None:
    config = Config(hostname="a", timeout=timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="rank 1 did not join"):
        Communicator(HashStore(), 0, 2, CPU, config, name="test")


def test_a_rank_that_gives_up_fails_the_others_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reporter, "PATIENCE", timedelta(seconds=2))  # nobody is busy here

    def body(communicator: Communicator) -> str:
        if communicator.rank == 2:
            communicator.close()
            return ""
        with pytest.raises(RuntimeError, match="CollectiveError") as caught:
            communicator.all_reduce(torch.ones(1000)).wait()
        return str(caught.value)

    messages = on_ranks("aab", body, plan="hierarchical", timeout=timedelta(seconds=2))
    assert all("failed on rank" in text and "rank 2" in text for text in messages if text)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, 3), "`flat` has shape"),
        (torch.ones(6)[::2], "`flat` has shape"),
        (torch.empty(3, device="meta"), "`flat` is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(bad: Tensor, message: str) -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            communicator.all_reduce(bad)

    on_ranks("a", body)


def test_a_single_rank_scales_too() -> None:
    def body(communicator: Communicator) -> Tensor:
        return communicator.all_reduce(torch.ones(3), scale=0.5).wait()

    (result,) = on_ranks("a", body)
    assert torch.equal(result, torch.full((3,), 0.5))


def test_a_plan_that_compresses_needs_a_compressor() -> None:
    def body(communicator: Communicator) -> None:
        plan = Plan("flat", (Phase(ALL_REDUCE, 0, whole=True, compressor="int8"),), 1, 12, 0.0, {}, "")
        with pytest.raises(ValueError, match="`plan` compresses with int8"):
            communicator.run(torch.ones(3), plan)

    on_ranks("ab", body)


def test_nothing_is_connected_once_it_is_closed() -> None:
    def body(communicator: Communicator) -> None:
        communicator.close()
        with pytest.raises(RuntimeError, match="gradwire is closed"):
            communicator._groups[(0, 0), (0,)]

    on_ranks("a", body)


def test_integers_are_not_averaged() -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=r"`scale` is 0\.5"):
            communicator.all_reduce(torch.ones(3, dtype=torch.int64), scale=0.5)

    on_ranks("a", body)


@pytest.mark.parametrize("numel", [99, 101])
def test_a_layout_of_another_size_than_its_buffer_is_refused(numel: int) -> None:
    store = HashStore()

    def run(rank: int) -> str:
        config = Config(hostname=f"n{rank}", compressor="int8", timeout=timedelta(seconds=20))
        compressor = make_composite("int8", {}, [])
        compressor.bind_model({"weight": numel})
        communicator = Communicator(store, rank, 2, CPU, config, name="test", compressor=compressor)
        layout = Layout((Slice("weight", (numel,), 0, 0, numel),))
        try:
            communicator.all_reduce(torch.ones(100), layout=layout)
        except ValueError as error:
            return str(error)
        finally:
            communicator.close()
        return ""

    for message in run_ranks(2, run):
        assert f"`layout` is of {numel} elements, but `flat` has 100" in message
