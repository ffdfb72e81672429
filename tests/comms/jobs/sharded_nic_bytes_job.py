"""One rank on the emulated cluster: prints what its node's NIC sends in a step of sharded training of a 4 MB model."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire.fsdp
from gradwire.bench.emulation.fork import ForkedRank

WIDTH = 1024


def sent() -> int:
    time.sleep(0.2)  # acknowledgements under way
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    replicas, shard = mesh["replicate"], mesh["shard"]
    report("HSDP native", sharded(mesh))
    for compressor in (None, "int8", "int4"):
        model = sharded(shard)
        state = gradwire.fsdp.apply(model, replicas=replicas, compressor=compressor)
        report(f"HSDP {compressor or 'exact'}", model)
        state.close()
    report("FSDP native", sharded(row))
    for shards, weights in (("exact", "exact"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int8")):
        model = sharded(row)
        gradwire.fsdp.apply(model, shards=shards, weights=weights)
        report(f"FSDP {shards} {weights}", model)
    place.leave()
    return 0


def report(name: str, model: nn.Module) -> None:
    def step() -> None:
        model(torch.randn(4, WIDTH)).square().sum().backward()

    step()  # all groups are connected
    dist.barrier()
    before = sent()
    step()
    after = sent()
    dist.barrier()
    line = json.dumps({"name": name, "nbytes": WIDTH * WIDTH * 4, "sent": after - before}) + "\n"
    os.write(1, line.encode())  # in one piece: ranks share the pipe
