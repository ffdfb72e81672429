"""What the hook costs the host beside torch's own `allreduce_hook`, with torch's real C++ underneath, taken in turns.

Process groups, works, futures, streams, events and the caching allocator are torch's own, so this runs where torch has
CUDA: on GPUs, or on the GPU stand-in of the tests, where CUDA and NCCL cost next to nothing on the thread that calls
them, and what is left is Python and torch. The hooks take turns in one run, step by step, so whatever else the machine
does falls on all of them alike.

    torchrun --nproc-per-node 4 --no-python python -m gradwire.bench.studies.gpu.host_ratio --nodes aabb

Rank 0 prints microseconds of its thread's processor time for a bucket (hook and the wait for its future): least and
median of the rounds, and the median of the ratios to `allreduce_hook` of the same round. `--profile` names the
functions in which the first of `--modes` spends them. Feeds docs/reference/gpu.md.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradwire.comms.bootstrap.compat import queue_end_of_backward
from gradwire.comms.hook import HookState

BUCKETS = 8
"""Of a step."""
NUMEL = 6144
"""Of a bucket: what is computed takes no time of note."""
WARM_STEPS = 30
"""Past step 23 gradwire times nothing any more."""
TORCH = "torch"

Hook = Callable[[Any], "torch.futures.Future[Tensor]"]


class _Bucket:
    """What DDP hands to a hook."""

    def __init__(self, index: int, buffer: Tensor, parameter: Tensor) -> None:
        self._index, self._buffer, self._parameters = index, buffer, [parameter]

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._index == BUCKETS - 1


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, body: Callable[[], None]) -> Tensor:
        ctx.body = body
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.body()
        return gradient, None


class MeasuredHook:
    """One way to average, and its buckets.

    Args:
        mode: `torch`, `flat`, `hierarchical`, or `hierarchical:` and a compressor.
        node: Name of this rank's node.
    """

    def __init__(self, mode: str, node: str) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.mode = mode
        self._model = nn.ParameterList([nn.Parameter(torch.zeros(NUMEL).to(device)) for _ in range(BUCKETS)])
        self._buffers = [torch.zeros(NUMEL).to(device) for _ in range(BUCKETS)]
        self._leaf = torch.zeros(1, requires_grad=True)
        self._state: HookState | None = None
        if mode == TORCH:
            self._hook: Hook = lambda bucket: allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group
        else:
            plan, _, compressor = mode.partition(":")
            self._state = HookState(
                self._model, plan=plan, chunks=1, hostname=node, compressor=compressor or None, straggler_every=0
            )
            self._hook = self._state.reduce

    def step(self) -> float:
        """One backward pass; seconds of processor time of a bucket."""
        futures: list[torch.futures.Future[Tensor]] = []
        buckets = [_Bucket(index, *pair) for index, pair in enumerate(zip(self._buffers, self._model, strict=True))]
        seconds = [0.0]
        hook = self._hook

        def wait() -> None:
            for future in futures:
                future.wait()
            seconds.append(time.thread_time())

        def body() -> None:
            seconds[0] = time.thread_time()
            for bucket in buckets:
                futures.append(hook(bucket))
            queue_end_of_backward(wait)

        _Backward.apply(self._leaf, body).sum().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return (seconds[-1] - seconds[0]) / BUCKETS

    def close(self) -> None:
        """Ends the state."""
        if self._state is not None:
            self._state.close()


def main() -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="aabb", help="a letter for each rank's node")
    parser.add_argument("--modes", default="flat,hierarchical", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each hook in a round")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    jobs = [MeasuredHook(mode, given.nodes[rank]) for mode in (TORCH, *given.modes.split(","))]
    for _ in range(WARM_STEPS):
        for job in jobs:
            job.step()
    rounds: dict[str, list[float]] = {job.mode: [] for job in jobs}
    for _ in range(given.rounds):
        for job in jobs:
            rounds[job.mode].append(statistics.median(job.step() for _ in range(given.steps)))
    if given.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(given.rounds):
            jobs[1].step()
        profile.disable()
        if rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for job in jobs:
        job.close()
    if rank == 0:
        print("| hook | least, us | median, us | of torch's |\n|---|---|---|---|")
        for mode, found in rounds.items():
            ratio = statistics.median(one / other for one, other in zip(found, rounds[TORCH], strict=True))
            print(f"| {mode} | {min(found) * 1e6:.0f} | {statistics.median(found) * 1e6:.0f} | {ratio:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
