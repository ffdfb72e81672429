"""One rank on the emulated cluster: a 16 MB model takes steps through the hook; prints what its node's NIC sent in one."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.bench.emulation.fork import ForkedRank


def sent() -> int:
    time.sleep(0.3)  # acknowledgements on their way
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    line = json.dumps(measured()) + "\n"
    os.write(1, line.encode())  # in one piece: ranks share the pipe
    place.leave()
    return 0


def measured() -> dict[str, object]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2000, 1999, bias=True), gradient_as_bucket_view=True)
    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)

    def step() -> None:
        model(torch.ones(1, 2000)).sum().backward()

    step()
    step()  # DDP has rebuilt its buckets, all groups are connected
    dist.barrier()
    before = sent()
    step()
    after = sent()
    dist.barrier()
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    return {"nbytes": nbytes, "sent": after - before, "cluster": state.report().cluster}
