"""What each rank of the tests of sharded training does; four ranks, two replicas of two shards."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire.fsdp
from gradwire.fsdp import FsdpState

REPLICAS, SHARDS = 2, 2
WIDTH = 64


class Tiny(nn.Module):
    """Uneven rows (padding), a norm, two blocks, a parameter that only some steps use, and tied weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inside = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.outside = nn.Linear(WIDTH, 33)
        if tied:
            self.spare.weight = self.blocks[0][1].weight  # type: ignore[index]

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        """(batch, 16) -> (batch, 33)."""
        x = self.inside(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        if spare:
            x = x + self.spare(x)
        out: Tensor = self.outside(x)
        return out


def mesh_of(replicas: int = REPLICAS, shards: int = SHARDS) -> DeviceMesh:
    """The mesh of all ranks."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, model: Tiny | None = None, **options: Any) -> Tiny:
    """Tiny in three units."""
    model = model or Tiny()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(step: int, micro: int = 0) -> Tensor:
    """This rank's."""
    seed = 1000 * step + 10 * dist.get_rank() + micro
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))


Step = Callable[[Any, int], None]


def plain_step(model: nn.Module, step: int) -> None:
    """Forward and backward."""
    model(batch(step)).square().mean().backward()


def train(model: nn.Module, steps: int = 3, take: Step = plain_step, first: int = 0, lr: float = 0.1) -> None:
    """SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        take(model, step)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards."""
    return {name: local(parameter).clone() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's, where there are some."""
    return {name: local(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def local(tensor: Tensor) -> Tensor:
    """A DTensor's local part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Where two have other bits."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def error_of(other: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference by the norm of what is wanted."""
    off = sum(float((other[name] - wanted[name]).square().sum()) for name in wanted)
    return float((off / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5)


@contextmanager
def job(backend: str = "gloo") -> Iterator[DeviceMesh]:
    """The default group and the mesh."""
    dist.init_process_group(backend)
    warnings.simplefilter("ignore")
    try:
        yield mesh_of()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def applied(mesh: DeviceMesh, model: Tiny | None = None, **options: Any) -> tuple[Tiny, FsdpState]:
    """Tiny sharded over one dimension, and gradwire between the replicas; FSDP's options in `fsdp`."""
    model = sharded(mesh["shard"], model, **options.pop("fsdp", {}))
    return model, gradwire.fsdp.apply(model, replicas=mesh["replicate"], **options)
