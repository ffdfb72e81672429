"""Trains two small models by two ranks, and prints a digest of what this rank has at the end; torchrun's variables
say which rank it is. The ranks may be of unlike processors.

    python training.py COMPRESSOR NODES [NODES ...]

For each NODES, a letter a rank, both models are trained: `aa` is one node, whose ranks meet in shared memory, `ab` are
two. The first model multiplies element by element, which gives the same gradients on every processor; the second has
matrix products, whose order of summation is each processor's own. The learning rate is a power of two, so that a fused
multiplication and addition rounds as two operations do. The output is a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import _native

STEPS = 5
SHAPES = ((4, 1_031), (64, 64), (10_007,))
LONGEST = 10_007
WAIT = timedelta(minutes=30)
"""An emulated processor is slow."""


class Elementwise(nn.Module):
    """Weights whose gradients are products of two numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randint(-512, 512, shape).float() / 512) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number."""
        return torch.stack([(w * w * x[: w.numel()].view_as(w)).sum() for w in self.weights]).sum()


def dense() -> nn.Module:
    """Returns layers that multiply matrices."""
    return nn.Sequential(nn.Linear(64, 129), nn.Tanh(), nn.Linear(129, 65))


def train(model: nn.Module, shape: tuple[int, ...], compressor: str, rank: int, node: str) -> str:
    """Trains a model on data of this rank, and returns a digest of its parameters."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    state = gradwire.HookState(ddp, compressor=compressor, hostname=node, timeout=WAIT)
    ddp.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = ddp(torch.randint(-512, 512, shape, generator=generator).float() / 512)
        (found if found.ndim == 0 else found.square().mean()).backward()
        optimizer.step()
    state.close()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def main() -> None:
    rank, began = int(os.environ["RANK"]), time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=WAIT)
    found = {}
    for nodes in sys.argv[2:]:
        for name, make, shape in (("elementwise", Elementwise, (LONGEST,)), ("dense", dense, (8, 64))):
            torch.manual_seed(5)
            found[f"{name}, {nodes}"] = train(make(), shape, sys.argv[1], rank, nodes[rank])
    dist.destroy_process_group()
    said = {"isa": _native.isa(), "weights": found, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
