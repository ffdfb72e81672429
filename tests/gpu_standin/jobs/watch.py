"""Plain DDP on torch's NCCL group, with or without a watch: which calls of CUDA its steps make.

watch.py WATCHES STEPS     WATCHES is 1 or 0; prints JSON: counts of calls, and what the watch has seen
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_standin.calls import Cuda
from torch import nn

import gradwire

WARM_UP = 5
STEP_SECONDS = 0.05


def main(watches: bool, steps: int) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    watch = gradwire.watch() if watches else None
    dist.init_process_group("nccl", timeout=timedelta(seconds=100))
    inner = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]).to(device)
    model = nn.parallel.DistributedDataParallel(inner, device_ids=[rank], bucket_cap_mb=0.003)
    runtime = Cuda()
    for step in range(steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            runtime.api.raw.gpu_standin_reset_counts()
        time.sleep(STEP_SECONDS)
        model(torch.ones(8, 24, device=device)).sum().backward()
    counts = runtime.counts()
    torch.cuda.synchronize()
    report = watch.report if watch is not None else None
    groups = {} if report is None else {each.name: each.collectives for each in report.groups}
    dist.destroy_process_group()
    print(json.dumps({"counts": counts, "groups": groups}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] == "1", int(sys.argv[2]))
