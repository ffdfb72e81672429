"""DistributedDataParallel's own reducer with gradwire's hook, on torch's NCCL group: gradients, their bits, and a loss.

ddp.py PLAN OPTIONS STEPS     OPTIONS is JSON for DistributedDataParallel, with "compressor" and "backend" for gradwire
"""

import hashlib
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire


class Model(nn.Module):
    """Linear layers, one of which is left out in every second step where `skips`."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(5)])
        self.head = nn.Linear(24, 3)
        self.skips = skips
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 2 and self.step % 2):
                x = torch.relu(layer(x))
        self.step += 1
        scores: torch.Tensor = self.head(x)
        return scores


def train(device: torch.device, rank: int, plan: str, options: dict[str, Any], steps: int) -> tuple[str, float]:
    """Trains a small model; what it became, as a digest, and its last loss."""
    settings = dict(options)
    compressor = settings.pop("compressor", None)
    settings.pop("backend", None)
    torch.manual_seed(1)
    model = Model(bool(settings.get("find_unused_parameters"))).to(device)
    ids = [device.index] if device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=0.003, **settings)
    state = gradwire.attach(
        ddp, plan=plan, hostname=os.environ["NODES"][rank], compressor=compressor, timeout=timedelta(seconds=80)
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    loss = torch.zeros(())
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 24, generator=generator).to(device)
        y = torch.randint(3, (8,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    last = loss.item()
    state.close()
    return digest.hexdigest(), last


def main(device_type: str, plan: str, options: str, steps: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    chosen = json.loads(options)
    backend = chosen.get("backend", "nccl" if device_type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=100))
    bits, loss = train(device, rank, plan, chosen, int(steps))
    dist.destroy_process_group()
    print(json.dumps({"bits": bits, "loss": loss}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
