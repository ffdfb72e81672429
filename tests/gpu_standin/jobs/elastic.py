"""A training whose last rank is killed between the forward and the backward pass of a step; the others go on.

elastic.py DEVICE OPTIONS     NODES has a letter for each rank; OPTIONS is JSON for gradwire's hook
"""

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_standin.jobs.model import Net, digest_of, loss_of
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, KILLED_IN = 6, 3


def main(kind: str, options: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=100))
    net = Net().to(device)
    ddp = DistributedDataParallel(net, device_ids=[rank] if kind == "cuda" else None, bucket_cap_mb=0.02)
    sizes: list[int] = []
    state = gradwire.attach(
        ddp,
        elastic=True,
        on_membership_change=lambda old, new: sizes.append(new.size),
        hostname=os.environ["NODES"][rank],
        timeout=timedelta(seconds=80),
        **json.loads(options),
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, rank, device)
        if step == KILLED_IN and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.item()).hex())
    print(json.dumps({"losses": losses, "bits": digest_of(net.parameters()), "sizes": sizes}), flush=True)
    state.close()
    os._exit(0)  # torch's default group still counts the rank that is gone


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
