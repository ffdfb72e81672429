"""gradwire's hook on torch's own NCCL group, streams, futures and caching allocator: exact sums, and their bits.

hook.py PLAN CHUNKS DTYPE STEPS [DEVICE]     NODES has a letter for each rank; DEVICE is torch's default one
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.bench.studies.gpu.backward import HandedBucket, in_backward
from gradwire.comms.hook import HookState

NUMELS = (3000, 4097, 777, 5000)


class Parameters(nn.Module):
    """Parameters that no kernel has written."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, numel in enumerate(NUMELS):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(numel, device="cuda", dtype=dtype)))


def gradient(index: int, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: every sum of them is exact in every dtype."""
    return ((torch.arange(NUMELS[index], device="cpu") * (index + 1) + 7 * rank + step) % 16).to(dtype)


def reduce_buckets(
    state: HookState, buffers: list[torch.Tensor], sources: list[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> None:
    """One backward pass: a kernel writes each bucket, the hook reduces it, DDP waits for all at the end."""

    def reduce_all() -> None:
        futures = []
        for index, parameter in enumerate(parameters):
            buffers[index].copy_(sources[index])
            last = index == len(parameters) - 1
            bucket: Any = HandedBucket(index, buffers[index], [parameter], last)
            futures.append(state.reduce(bucket))

        def wait() -> None:
            for future in futures:
                future.wait()

        torch.autograd.Variable._execution_engine.queue_callback(wait)

    in_backward(reduce_all)


def main(plan: str, chunks: str, dtype_name: str, steps: str, default: str | None = None) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dtype = getattr(torch, dtype_name)
    torch.cuda.set_device(rank)
    torch.set_default_device(default)
    dist.init_process_group("nccl", timeout=timedelta(seconds=90))
    model = Parameters(dtype)
    parameters = list(model.parameters())
    node = os.environ["NODES"][rank]
    state = HookState(model, plan={"name": plan, "chunks": int(chunks)}, hostname=node, timeout=timedelta(seconds=60))
    buffers = [torch.empty(numel, device="cuda", dtype=dtype) for numel in NUMELS]
    digest = hashlib.sha256()
    for step in range(int(steps)):
        sources = [gradient(index, rank, step, dtype).cuda() for index in range(len(NUMELS))]
        reduce_buckets(state, buffers, sources, parameters)
        for index, buffer in enumerate(buffers):
            got = buffer.cpu()
            want = torch.stack([gradient(index, other, step, torch.float64) for other in range(size)]).sum(0) / size
            assert torch.equal(got.double(), want), f"step {step}, bucket {index}: {got[:4]}, not {want[:4]}"
            digest.update(got.view(torch.uint8).numpy().tobytes())
    state.close()
    dist.destroy_process_group()
    print(json.dumps({"bits": digest.hexdigest()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
