"""One rank of a job in which rank VICTIM is killed in the middle of step 2; survivors print what they were told."""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.comms.bootstrap.compat import GradBucket

RANK, VICTIM = int(os.environ["RANK"]), int(sys.argv[1])

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
hostname = os.environ["NODES"][RANK] if "NODES" in os.environ else None
model = nn.parallel.DistributedDataParallel(nn.Linear(600, 500), bucket_cap_mb=0.1)
state = gradwire.HookState(model, hostname=hostname, timeout=timedelta(seconds=20))


def hook(state: gradwire.HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if RANK == VICTIM and state.steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return gradwire.comm_hook(state, bucket)


model.register_comm_hook(state, hook)
began = time.monotonic()
try:
    for _ in range(5):
        began = time.monotonic()
        model(torch.randn(4, 600)).sum().backward()
except RuntimeError as error:
    print(json.dumps({"seconds": time.monotonic() - began, "error": str(error), "steps": state.steps}), flush=True)
    os._exit(7)  # as a training script that dies of the error would, without waiting for torch's own shutdown
