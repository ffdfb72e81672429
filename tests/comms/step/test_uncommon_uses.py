"""Law: what few scripts do trains as plain DDP: the same weights where exact, near ones in few bits, on all ranks."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from support.processes import Processes

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "dgc": {"density": 0.2, "momentum": 0.0, "warmup_steps": 1},
    "powersgd": {"rank": 2, "warmup_steps": 1},
}


def inputs(step: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


class Again(nn.Module):
    """Blocks that autograd computes again, all of which use one layer: DDP takes that with a static graph alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.shared = nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        value.requires_grad_()
        for block in self.blocks:
            value = checkpoint(
                lambda given, block=block: torch.tanh(self.shared(block(given))), value, use_reentrant=True
            )
        return value


class Tied(nn.Module):
    """Two layers that share their weight, as an embedding and a head do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(value)))
        return result


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 640), nn.Tanh(), nn.Linear(640, 640), nn.Tanh(), nn.Linear(640, 32))


def steps(forward: Callable[[Tensor], Tensor], model: nn.Module, number: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(number):
        optimizer.zero_grad()
        forward(inputs(step)).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def compiled(model: DistributedDataParallel) -> None:
    steps(torch.compile(model, backend="aot_eager"), model)


def uneven(model: DistributedDataParallel) -> None:
    with Join([model]):
        steps(model, model, STEPS + 2 * dist.get_rank())
    steps(model, model, 1)


def plainly(model: DistributedDataParallel) -> None:
    steps(model, model)


USES: dict[str, tuple[Callable[[], nn.Module], Callable[[DistributedDataParallel], None], dict[str, Any]]] = {
    "compiled": (layers, compiled, {"bucket_cap_mb": 1.0, "static_graph": True}),
    "computed again": (Again, plainly, {"static_graph": True, "bucket_cap_mb": 0.003}),
    "tied": (Tied, plainly, {}),
    "uneven": (layers, uneven, {}),
    "uneven, static": (layers, uneven, {"static_graph": True}),
}
"""Use -> model, training, and options of DDP."""


def trained(use: str, compressor: str | None) -> Tensor:
    make, train, options = USES[use]
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **options)
    if compressor is not None:
        state = gradwire.HookState(model, compressor=compressor, compressor_options=OPTIONS.get(compressor, {}))
        model.register_comm_hook(state, gradwire.comm_hook)
    train(model)
    return torch.cat([each.detach().view(-1) for each in model.parameters()])


def every_use(_: int) -> dict[str, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    dist.init_process_group("gloo")
    found = {}
    for use, (make, _train, _options) in USES.items():
        torch.manual_seed(0)
        begun = torch.cat([each.detach().view(-1) for each in make().parameters()])
        found[use] = begun, trained(use, None), {name: trained(use, name) for name in ("none", "int8", *OPTIONS)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_uncommon_uses_train_as_plain_ddp_does(processes: Processes) -> None:
    ranks = processes(2, every_use, nodes="ab", seconds=400)
    for use in USES:
        begun, plain, by = ranks[0][use]
        assert torch.equal(by["none"], plain), use
        for name, weights in by.items():
            assert torch.equal(weights, ranks[1][use][2][name]), (use, name)
            assert (weights - plain).norm() < (0.1 if name in ("none", "int8") else 0.9) * (plain - begun).norm(), (
                use,
                name,
            )


def closed_in_backward(rank: int, closes: tuple[int, ...]) -> list[str]:
    """What a step says in the middle of which some ranks close their state, and the step after it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02)
    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)
    said = []
    for step in range(3):
        if step == 1 and rank in closes:
            model.module[3].weight.register_hook(lambda gradient: state.close())
        model.zero_grad()
        try:
            model(torch.ones(4, 64)).sum().backward()
        except RuntimeError as error:
            said.append(str(error))
    state.close()
    return said


@pytest.mark.parametrize("nodes", ["aa", "ab"])
@pytest.mark.parametrize("closes", [(0, 1), (1,)])
def test_a_state_that_is_closed_in_a_backward_pass_ends_it_on_all_ranks(
    processes: Processes, nodes: str, closes: tuple[int, ...]
) -> None:
    """Law: long before the time-out, and never with DDP's own words."""
    for rank, said in enumerate(processes(2, closed_in_backward, closes, nodes=nodes, seconds=50)):
        assert len(said) == 2, "the step, and the next one"
        assert all("gradwire is closed" in text if rank in closes else "rank 1 " in text for text in said), said
