"""NCCL groups and the hook on one GPU: four ranks as two logical nodes; the same functions on the CPU are the twins.

NCCL refuses two ranks of one host on one GPU, so every rank gets another NCCL_HOSTID and they talk over loopback
sockets; gradwire's own placement goes by the hostname in its configuration. From NCCL 2.30 on, two ranks of one host
may share a GPU where NCCL_MULTI_RANK_GPU_ENABLE says so. Source: NCCL documentation, Environment Variables.
"""

import os
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.bootstrap.compat import HashStore, PrefixStore, store_of
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.config import Config
from gradwire.comms.fusion import FusionPlan
from gradwire.comms.transport import nccl
from gradwire.comms.transport.groups import Groups
from support.processes import Processes

Options = Mapping[str, bool | int | float | str]

NODES = ["one", "one", "two", "two"]
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
COMPRESSORS: dict[str | None, Options] = {
    None: {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "onebit": {"warmup_steps": 0, "momentum": 0.0},
    "dgc": {"warmup_steps": 0, "density": 0.05},
    "powersgd": {"warmup_steps": 0},
}
SHAPES = ((96, 160), (96,), (16, 24, 3, 3), (5000,), (7,))
STEPS = 3


def start(rank: int, kind: str, shared: bool = False) -> torch.device:
    """Joins the default group; `kind` is cpu or cuda, `shared` puts the ranks of a logical node on one NCCL host."""
    os.environ["NCCL_HOSTID"] = NODES[rank] if shared else f"rank{rank}"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


class Given(nn.Module):
    """A model whose gradients are its inputs: the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack(
            [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        ).sum()


def given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def averages(
    rank: int,
    kind: str,
    compressor: str | None,
    chunks: int = 1,
    pieces: int = 0,
    joined: bool = False,
    shared: bool = False,
) -> list[Tensor]:
    """The gradients that DDP hands back in each step, on the CPU."""
    device = start(rank, kind, shared)
    model = DistributedDataParallel(Given().to(device), bucket_cap_mb=0.05)
    state = gradwire.HookState(
        model,
        compressor=compressor,
        compressor_options=dict(COMPRESSORS[compressor]),
        plan={"name": "hierarchical", "chunks": chunks},
    )
    model.register_comm_hook(state, gradwire.comm_hook)
    results = []
    for step in range(STEPS):
        model.zero_grad()
        model([gradient.to(device) for gradient in given(rank, step)]).backward()
        results.append(
            torch.cat([weight.grad.view(-1) for weight in model.parameters() if weight.grad is not None]).cpu()
        )
        if step == 0 and (pieces or joined):
            state.fuse(FusionPlan(piece_nbytes=pieces, threshold_nbytes=1 << 30 if joined else 0))
    state.close()
    dist.destroy_process_group()
    return results


def sums(rank: int, kind: str) -> list[Tensor]:
    """Exact all-reduces of every plan, of sizes that leave ranks without a slice too."""
    device = start(rank, kind)
    group = dist.group.WORLD
    assert group is not None
    results = []
    for plan in ("flat", "hierarchical", "leader"):
        config = Config(hostname=NODES[rank], plan={"name": plan, "chunks": 3}, timeout=timedelta(seconds=60))
        communicator = Communicator(store_of(group), rank, 4, device, config, name=plan)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            for numel in (1, 17, 40_000):
                flat = torch.arange(numel).remainder(13).add(rank).to(device, dtype)
                results.append(communicator.all_reduce(flat).wait().cpu())
        communicator.close()
    dist.destroy_process_group()
    return results


def mixed(rank: int, kind: str, compressor: str | None) -> tuple[Tensor, list[float], bool]:
    """Three steps with GradScaler, the second with an infinite gradient on rank 0: weights, scales, was it kept."""
    device = start(rank, kind)
    torch.manual_seed(0)
    first = nn.Linear(64, 256)
    model = DistributedDataParallel(nn.Sequential(first, nn.ReLU(), nn.Linear(256, 8)).to(device))
    state = gradwire.HookState(model, compressor=compressor, compressor_options=dict(COMPRESSORS[compressor]))
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(kind, init_scale=1024.0)
    if compressor:
        state.watch(scaler)
    scales, moved = [], True
    for step in range(3):
        optimizer.zero_grad()
        before = first.weight.detach().clone()
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
            loss = model(inputs).float().square().mean()
        scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved = moved and bool((first.weight != before).any()) == (step != 1)
    weights = torch.cat([weight.detach().view(-1) for weight in model.parameters()]).cpu()
    state.close()
    dist.destroy_process_group()
    return weights, scales, moved


def check_sums(results: list[list[Tensor]]) -> None:
    cases = [
        (dtype, numel)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
        for numel in (1, 17, 40_000)
    ]
    for rank in results:
        for (dtype, numel), result in zip(3 * cases, rank, strict=True):
            assert torch.equal(result, (4 * torch.arange(numel).remainder(13) + 6).to(dtype))


def check_mixed(results: list[tuple[Tensor, list[float], bool]]) -> None:
    for weights, scales, moved in results:
        assert torch.equal(weights, results[0][0])
        assert weights.isfinite().all()
        assert scales == [1024.0, 512.0, 512.0]
        assert moved


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(RuntimeError, match="without NCCL: install a CUDA build of torch"):
        nccl.connect(HashStore(), 0, 1, timedelta(seconds=1))


class Communicators:
    """Stands in for torch's NCCL groups: counts how many were made, over which store, and how many were ended."""

    def __init__(self) -> None:
        self.stores: list[PrefixStore] = []
        self.ended = 0

    def make(self, store: PrefixStore, rank: int, size: int, timeout: timedelta, **options: object) -> "Communicators":
        self.stores.append(store)
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def abort(self) -> None:
        self.ended += 1


def test_ranks_share_one_communicator_in_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, store = Communicators(), HashStore()
    monkeypatch.setattr(nccl, "make_nccl", made.make)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    groups = Groups(
        PollingStore(store, timedelta(seconds=1)),
        1,
        torch.device("cuda", 0),
        lambda members: True,
        "auto",
        timedelta(seconds=1),
        lambda: None,
    )
    node, between = groups[(0, 0), (0, 1)], groups[(1, 0), (1, 3)]
    assert groups[(2, 0), (0, 1)] is node
    assert groups[(1, 2), (1, 3)] is between
    assert (between.rank, between.size) == (0, 2)
    assert len(made.stores) == 2
    assert all(isinstance(each.underlying_store, HashStore) for each in made.stores), "a C++ thread asks it"
    groups.close(0.1)  # the other members never come
    assert made.ended == 2


def test_the_twins_on_the_cpu(processes: Processes) -> None:
    check_sums(processes(4, sums, "cpu", nodes=NODES))
    check_mixed(processes(4, mixed, "cpu", "onebit", nodes=NODES))
    exact = processes(4, averages, "cpu", None, 2, nodes=NODES)
    for rank in exact:
        for step, result in enumerate(rank):
            mine = torch.stack([torch.cat([each.view(-1) for each in given(other, step)]) for other in range(4)])
            torch.testing.assert_close(result, mine.mean(0))
    for pieces, joined in ((10_000, False), (0, True)):
        again = processes(4, averages, "cpu", None, 2, pieces, joined, nodes=NODES)
        assert all(torch.equal(result, wanted) for result, wanted in zip(again[3], exact[0], strict=True))


@pytest.mark.gpu
def test_sums_are_exact(processes: Processes) -> None:
    check_sums(processes(4, sums, "cuda", nodes=NODES, environment=ENVIRONMENT))


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_gradients_are_the_cpus(processes: Processes, compressor: str | None) -> None:
    """Bit for bit, but for PowerSGD, whose products cuBLAS sums in another order."""
    wanted = processes(4, averages, "cpu", compressor, nodes=NODES)[0]
    results = processes(4, averages, "cuda", compressor, nodes=NODES, environment=ENVIRONMENT)
    tolerance = 1e-4 if compressor == "powersgd" else 0.0
    for rank in results:
        assert all(torch.equal(ours, first) for ours, first in zip(rank, results[0], strict=True))
        for ours, twin in zip(rank, wanted, strict=True):
            torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chunks", "pieces", "joined"), [(3, 0, False), (1, 10_000, False), (1, 0, True), (3, 0, True)]
)
def test_chunks_pieces_and_joined_buckets_change_no_bit(
    processes: Processes, chunks: int, pieces: int, joined: bool
) -> None:
    wanted = processes(4, averages, "cpu", None, nodes=NODES)[0]
    for rank in processes(4, averages, "cuda", None, chunks, pieces, joined, nodes=NODES, environment=ENVIRONMENT):
        assert all(torch.equal(ours, twin) for ours, twin in zip(rank, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", [None, "onebit"])
def test_two_ranks_of_a_host_share_the_gpu(processes: Processes, compressor: str | None) -> None:
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if found < (2, 30):
        pytest.skip(f"NCCL {'.'.join(map(str, found))} refuses two ranks of one host on one GPU; 2.30 does not")
    wanted = processes(4, averages, "cpu", compressor, nodes=NODES)[0]
    environment = ENVIRONMENT | SHARED_GPU
    for rank in processes(4, averages, "cuda", compressor, 1, 0, False, True, nodes=NODES, environment=environment):
        assert all(torch.equal(ours, twin) for ours, twin in zip(rank, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_an_infinite_gradient_skips_the_step(processes: Processes, compressor: str | None) -> None:
    check_mixed(processes(4, mixed, "cuda", compressor, nodes=NODES, environment=ENVIRONMENT))
