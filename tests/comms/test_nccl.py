"""NCCL groups and the hook on one GPU: four ranks as two logical nodes, each rank a host of its own to NCCL.

NCCL refuses two ranks of one host on one GPU, so every rank gets another NCCL_HOSTID and they talk over loopback sockets;
gradwire's own placement goes by the hostname in its configuration.
"""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

pytestmark = pytest.mark.gpu

Processes = Callable[..., list[object]]
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0"}
NODES = ["one", "one", "two", "two"]


def start(rank: int) -> torch.device:
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    dist.init_process_group("gloo")
    return torch.device("cuda", 0)


def train(rank: int, compressor: str | None) -> tuple[list[float], bool]:
    device = start(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device))
    options: dict[str, bool | int | float | str] = {"warmup_steps": 0, "momentum": 0.0} if compressor == "onebit" else {}
    state = gradwire.HookState(model, compressor=compressor, compressor_options=options)
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(16, 64, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    values = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).cpu()
    dist.destroy_process_group()
    return values.tolist(), bool(values.isfinite().all())


@pytest.mark.parametrize("compressor", [None, "fp16", "onebit"])
def test_ddp_on_the_gpu_is_equal_on_all_ranks(processes: Processes, compressor: str | None) -> None:
    results = processes(4, train, compressor, nodes=NODES, environment=ENVIRONMENT)
    assert all(result == results[0] for result in results)
    assert results[0][1]  # type: ignore[index]
