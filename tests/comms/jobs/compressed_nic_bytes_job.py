"""One rank on the emulated cluster: prints what its node's NIC sends in a compressed step of one square layer."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.bench.emulation.fork import ForkedRank
from gradwire.compressors.registry import names, options_of

WIDTH = 1024
"""Of the layer."""


def step(model: nn.Module, width: int) -> None:
    model.zero_grad()
    model(torch.randn(4, width, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()


def sent() -> int:
    time.sleep(0.2)  # acknowledgements under way
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    for name in names():
        line = json.dumps(measured(name)) + "\n"
        os.write(1, line.encode())  # in one piece: ranks share the pipe
    place.leave()
    return 0


def measured(name: str) -> dict[str, object]:
    width = WIDTH
    model = nn.parallel.DistributedDataParallel(nn.Linear(width, width), gradient_as_bucket_view=True)
    warm = {"warmup_steps": 0} if "warmup_steps" in options_of(name) else {}
    state = gradwire.HookState(model, compressor=name, compressor_options=warm, nic_bytes_per_second=25e6)
    model.register_comm_hook(state, gradwire.comm_hook)
    step(model, width)
    step(model, width)  # DDP has rebuilt its buckets, all groups are connected
    dist.barrier()
    before = sent()
    step(model, width)
    after = sent()
    dist.barrier()
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    return {"compressor": name, "nbytes": nbytes, "sent": after - before}
