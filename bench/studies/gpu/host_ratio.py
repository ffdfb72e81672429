"""Compares what gradwire's hook and torch's `allreduce_hook` cost the host, with torch's real C++ underneath.

Process groups, works, futures, streams, events and the caching allocator are torch's own, so this runs where torch has
CUDA: on GPUs, or on the GPU stand-in of the tests, where CUDA and NCCL cost next to nothing on the thread that calls
them, and what is left is Python and torch. The hooks take turns in one run, step by step, so whatever else the machine
does falls on all of them alike.

    torchrun --nproc-per-node 4 -m gradwire.bench.studies.gpu.host_ratio --nodes aabb

Rank 0 prints microseconds of its thread's processor time for a bucket (hook, end of the step, wait for the future):
the least of all steps and the median of the rounds, and of both the ratio to `allreduce_hook`: of the leasts, and the
median of the rounds' own. As in training the device is behind the host: it waits for a collective that the other ranks
issue when rank 0 is through, and they do nothing meanwhile. So no stream runs dry, and nothing else of the job runs
beside what is measured.

`--profile` names the functions in which the first of `--modes` spends its time. Feeds docs/results/gpu.md.
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gradwire.bench.studies.gpu.backward import HandedBucket, in_backward
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.comms.bootstrap.compat import queue_end_of_backward
from gradwire.comms.environment import local_rank, set_launch_order
from gradwire.comms.hook import HookState

BUCKETS = 8
"""Number of buckets in a step."""
PARAMETERS = 12
"""Number of parameters in a bucket."""
SHAPE = (64, 32)
"""Shape of each parameter: large enough to be compressed, small enough to be computed at once."""
WARM_STEPS = 30
"""Steps before the first one that is measured. After step 23 gradwire no longer times its transfers."""
TORCH = "torch"

Hook = Callable[[Any], "torch.futures.Future[Tensor]"]


class Gate:
    """Holds the devices back until rank 0's host has issued its step."""

    def __init__(self, device: torch.device) -> None:
        self._hosts = dist.new_group(backend="gloo")
        self._devices = dist.new_group()
        self._token = torch.zeros(1).to(device)
        self._first = dist.get_rank() == 0
        dist.all_reduce(self._token, group=self._devices)  # connects the ranks, which makes hosts wait

    def before(self) -> None:
        """Begins a step: makes rank 0's device wait for the other ranks, and their hosts wait for rank 0."""
        if not self._first:
            dist.barrier(self._hosts)
        dist.all_reduce(self._token, group=self._devices)

    def behind(self) -> None:
        """Ends a step: lets the other ranks go on, and returns when this rank's device has finished."""
        if self._first:
            dist.barrier(self._hosts)
        torch.cuda.synchronize()


class MeasuredHook:
    """Runs one hook over buckets of its own and times it.

    Args:
        mode: `torch`, `flat`, `hierarchical`, or `hierarchical:` and a compressor.
        node: Name of this rank's node.
        gate: Holds the device back in each step.
    """

    def __init__(self, mode: str, node: str, gate: Gate) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.mode = mode
        self._gate = gate
        self._model = nn.ParameterList(
            [nn.Parameter(torch.zeros(SHAPE).to(device)) for _ in range(BUCKETS * PARAMETERS)]
        )
        parameters = list(self._model)
        self._buckets = [
            HandedBucket(
                index,
                torch.zeros(PARAMETERS * parameters[0].numel()).to(device),
                parameters[PARAMETERS * index : PARAMETERS * (index + 1)],
                index == BUCKETS - 1,
            )
            for index in range(BUCKETS)
        ]
        self._state: HookState | None = None
        if mode == TORCH:
            self._hook: Hook = lambda bucket: allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group
        else:
            plan, _, compressor = mode.partition(":")
            self._state = HookState(
                self._model,
                plan={"name": plan, "chunks": 1},
                hostname=node,
                compressor=compressor or None,
                straggler_every=0,
            )
            self._hook = self._state.reduce

    def step(self, watched: AbstractContextManager[object] | None = None, *, gated: bool = True) -> float:
        """Runs one backward pass through the hook.

        Args:
            watched: Context manager that is entered around what is measured, for a profiler; None for none.
            gated: Whether the gate holds the device back until rank 0's host has issued the step.

        Returns:
            Seconds of this thread's processor time for a bucket.
        """
        watched = watched or nullcontext()
        futures: list[torch.futures.Future[Tensor]] = []
        seconds: list[float] = []

        def wait() -> None:
            for future in futures:
                future.wait()
            seconds.append(time.thread_time())
            watched.__exit__(None, None, None)

        def reduce_all() -> None:
            watched.__enter__()
            seconds.append(time.thread_time())
            for bucket in self._buckets:
                futures.append(self._hook(bucket))
            queue_end_of_backward(wait)

        if gated:
            self._gate.before()
        in_backward(reduce_all)
        if gated:
            self._gate.behind()
        began, ended = seconds
        return (ended - began) / BUCKETS

    def close(self) -> None:
        """Closes gradwire's state; does nothing for torch's hook."""
        if self._state is not None:
            self._state.close()


def main() -> None:
    """Measures all hooks in turns as one rank of a job that torchrun started; rank 0 prints the table.

    With `--profile` it runs the first of `--modes` once more under a profiler, whose figures rank 0 prints before.
    """
    parser = StudyParser("gpu.host_ratio", __doc__)
    parser.add_argument("--nodes", default="aabb", help="a letter for each rank's node")
    parser.add_argument("--modes", default="flat,hierarchical", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each hook in a round")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    set_launch_order()  # several jobs in one process: gradwire sets it for a job's first state, before anything has run
    rank = local_rank() or 0
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=timedelta(minutes=10))
    gate = Gate(torch.device("cuda", torch.cuda.current_device()))
    jobs = [MeasuredHook(mode, given.nodes[rank], gate) for mode in (TORCH, *given.modes.split(","))]
    for _ in range(WARM_STEPS):
        for job in jobs:
            job.step(gated=False)  # in its first steps a hook connects and measures, and may wait for the device
    rounds: dict[str, list[list[float]]] = {job.mode: [] for job in jobs}
    for _ in range(given.rounds):
        for job in jobs:
            rounds[job.mode].append([job.step() for _ in range(given.steps)])
    if given.profile:
        profile = cProfile.Profile(time.thread_time)
        for _ in range(given.rounds * given.steps):
            jobs[1].step(profile)
        if rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    for job in jobs:
        job.close()
    if rank == 0:
        print(table(rounds))
    dist.destroy_process_group()


def table(rounds: dict[str, list[list[float]]]) -> str:
    """Returns a table in Markdown: for each hook its least and median time for a bucket, and both relative to torch's.

    The last column is the median over the rounds of the ratio to torch's hook in the same round.

    Args:
        rounds: By hook, for each round the seconds for a bucket in each of its steps; `torch` must be among the hooks.
    """
    least = {mode: min(map(min, found)) for mode, found in rounds.items()}
    medians = {mode: [statistics.median(steps) for steps in found] for mode, found in rounds.items()}
    lines = ["| hook | least, us | median, us | least, of torch's | median, of torch's |", "|---|---|---|---|---|"]
    for mode, found in medians.items():
        ratio = statistics.median(one / other for one, other in zip(found, medians[TORCH], strict=True))
        lines.append(
            f"| {mode} | {least[mode] * 1e6:.0f} | {statistics.median(found) * 1e6:.0f} | "
            f"{least[mode] / least[TORCH]:.2f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
