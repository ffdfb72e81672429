"""One rank on the emulated cluster: a 16 MB model takes steps through the hook; prints what its node's NIC sent in one."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(2000, 1999, bias=True), gradient_as_bucket_view=True)
state = gradwire.HookState(model)
model.register_comm_hook(state, gradwire.comm_hook)


def step() -> None:
    model(torch.ones(1, 2000)).sum().backward()


def sent() -> int:
    time.sleep(0.3)  # acknowledgements on their way
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


step()
step()  # DDP has rebuilt its buckets, all groups are connected
dist.barrier()
before = sent()
step()
after = sent()
dist.barrier()
nbytes = sum(parameter.numel() for parameter in model.parameters()) * 4
print(json.dumps({"nbytes": nbytes, "sent": after - before, "cluster": state.report().cluster}), flush=True)
dist.destroy_process_group()
