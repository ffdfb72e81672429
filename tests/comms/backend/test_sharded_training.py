"""FSDP2 and ZeRO-1 on the backend "gradwire" train with the bits of gloo, and their collectives are planned ones.

Gradients are sums of small integers, exact in any order; so is their division by a power of two.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from gradwire.comms.backend.planned_collectives import PlannedCollectives
from support.processes import Processes


def counting(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the collectives that are planned from now on."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., object]:
        method = getattr(PlannedCollectives, name)

        def call(collectives: PlannedCollectives, *arguments: object, **named: object) -> object:
            calls[name] += 1
            return method(collectives, *arguments, **named)

        return call

    for name in ("all_gather", "reduce_scatter", "broadcast", "all_gather_list", "reduce_scatter_list"):
        monkeypatch.setattr(PlannedCollectives, name, counted(name))
    return calls


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randint(-4, 5, (8, 128), generator=generator).float()).sum().backward()
        optimizer.step()


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(128, 700), nn.Identity())


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def train_sharded(rank: int, backend: str) -> tuple[list[Tensor], Counter[str]]:
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = counting(monkeypatch)
        held: list[Tensor] = []
        for factor in (None, 8.0):
            model = make_model()
            mesh = init_device_mesh("cpu", (4,))
            for module in (model[0], model):
                sharded = fully_shard(module, mesh=mesh)
                if factor is not None:  # PREMUL_SUM, which gloo lacks
                    sharded.set_gradient_divide_factor(factor)
                    sharded.set_force_sum_reduction_for_comms(backend == "gloo")
            train(model, torch.optim.SGD(model.parameters(), lr=0.25), rank)
            held += [whole(parameter) for parameter in model.parameters()]
        replica = nn.parallel.DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=0.25)
        train(replica, optimizer, rank)
        held += [whole(parameter) for parameter in replica.parameters()]
        held += listed_and_coalesced(rank)
        if backend != "gloo":
            for numel in (3, 0, 50_000):  # small and empty ones too: gloo has none
                tensor, part = torch.full((numel,), rank + 1.0), torch.empty(numel)
                dist.all_reduce(tensor, op=dist.ReduceOp.PREMUL_SUM(0.5))
                source = torch.full((4 * numel,), rank + 1.0)
                reduce_scatter = dist.reduce_scatter_single
                reduce_scatter(part, source, op=dist.ReduceOp.PREMUL_SUM(0.25))
                assert torch.equal(tensor, torch.full((numel,), 5.0)) and torch.equal(part, torch.full((numel,), 2.5))
        if backend == "gloo":
            del replica  # outliving its group, the reducer of a DDP model can wait for ever for gloo's threads
        dist.destroy_process_group()
    return held, calls


def listed_and_coalesced(rank: int) -> list[Tensor]:
    """The other forms of the collectives."""
    numels = (40_000, 7, 20_000)
    sources = [torch.full((numel,), float(rank + 1)) for numel in numels]
    listed = [torch.empty(numels[0]) for _ in range(4)]
    dist.all_gather(listed, sources[0])
    part = torch.empty(numels[0])
    dist.reduce_scatter(part, [sources[0] * factor for factor in range(4)])
    outputs = [torch.empty(4 * numel) for numel in numels]
    parts = [torch.empty(numel) for numel in numels]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as gathering:
        for output, source in zip(outputs, sources, strict=True):
            dist.all_gather_single(output, source)
    gathering.wait()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as scattering:
        for each, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_single(each, output)
    scattering.wait()
    return [*listed, part, *outputs, *parts]


def test_sharded_training_has_the_bits_of_gloo(processes: Processes) -> None:
    ours = processes(4, train_sharded, "gradwire", nodes=["a", "a", "b", "b"])
    theirs = processes(4, train_sharded, "gloo")
    for rank, ((left, calls), (right, none)) in enumerate(zip(ours, theirs, strict=True)):
        assert len(left) == len(right) > 10 and not none
        assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True)), rank
        assert calls["all_gather"] >= 6 and calls["reduce_scatter"] >= 9 and calls["broadcast"] >= 3, calls
        assert calls["all_gather_list"] == calls["reduce_scatter_list"] == 1
