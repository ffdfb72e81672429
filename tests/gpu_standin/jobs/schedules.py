"""Many schedules of one job: the same hook, plan and gradients under another jitter each, on connections made once.

schedules.py PLAN DTYPE SEEDS     prints the bits of each seed
"""

import hashlib
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_standin.calls import Cuda
from gpu_standin.jobs.hook import NUMELS, Parameters, gradient, reduce_buckets

from gradwire.comms.hook import HookState

STEPS = 2


def main(plan: str, dtype_name: str, seeds: str) -> None:
    rank, dtype = int(os.environ["RANK"]), getattr(torch, dtype_name)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=90))
    model = Parameters(dtype)
    node = os.environ["NODES"][rank]
    chunks = 2 if plan == "hierarchical" else 1
    state = HookState(model, plan=plan, chunks=chunks, hostname=node, timeout=timedelta(seconds=80))
    buffers = [torch.empty(numel, device="cuda", dtype=dtype) for numel in NUMELS]
    cuda, bits = Cuda(), []
    for seed in range(int(seeds)):
        cuda.set("JITTER_US", str((0, 300, 2000)[seed % 3]))
        cuda.api.raw.gpu_standin_seed(seed * 1000 + rank)
        digest = hashlib.sha256()
        for step in range(STEPS):
            # Not whole numbers: in another order of additions they would have other bits.
            sources = [
                gradient(index, rank, step, torch.float32).mul_(0.1).to(dtype).cuda() for index in range(len(NUMELS))
            ]
            reduce_buckets(state, buffers, sources, list(model.parameters()))
            for buffer in buffers:
                digest.update(buffer.cpu().view(torch.uint8).numpy().tobytes())
        bits.append(digest.hexdigest())
    state.close()
    dist.destroy_process_group()
    print(json.dumps({"bits": bits}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
