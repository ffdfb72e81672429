"""One rank on the emulated cluster: sets of ranks train a 16 MB model through the hook, one set after the other.

Prints what this rank's NIC sent in a step of each set that it is in.
"""

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
    time.sleep(0.3)  # acknowledgements under way
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    place.connect()
    for name, members in json.loads(arguments[0]).items():
        group = dist.new_group(members)
        if place.rank in members:
            line = json.dumps({"placement": name, "node": place.node} | measured(group)) + "\n"
            os.write(1, line.encode())  # in one piece: ranks share the pipe
        dist.barrier()
    place.leave()
    return 0


def measured(group: dist.ProcessGroup) -> dict[str, object]:
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(2000, 1999, bias=True), gradient_as_bucket_view=True, process_group=group
    )
    state = gradwire.HookState(model)
    model.register_comm_hook(state, gradwire.comm_hook)

    def step() -> None:
        model(torch.ones(1, 2000)).sum().backward()

    step()
    step()  # DDP has rebuilt its buckets, all groups are connected
    dist.barrier(group)
    before = sent()
    step()
    after = sent()
    dist.barrier(group)
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * 4
    return {"nbytes": nbytes, "sent": after - before, "cluster": state.report().cluster}
