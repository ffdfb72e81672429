"""What tuning is worth: a model as it was wrapped beside its twin with the tuner on, in turns, on an emulated cluster.

Feeds docs/results/choosing.md.

Run it as the ranks of a job: `gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit -- python -m
gradwire.bench.studies.tuned --backward-ms 160`. Rank 0 prints one JSON line. Backward sleeps, as a host does whose
accelerator computes, so that the ranks of one machine do not wait for each other's arithmetic.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comms.autotune.tune import Tuning
from gradwire.comms.wrap import wrap

LAYERS, SIDE = 16, 256
"""Matrices: 4 MB of gradients."""
TURNS, STEPS = 6, 6
"""Steps of a turn, of which the first does not count."""
SEARCH_STEPS = 140
"""One search, and a few steps more."""


class _Slow(torch.autograd.Function):
    """Passes everything on; its backward takes a while."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


class SlowLinear(nn.Linear):
    """A layer whose backward takes `seconds`, whatever the processor does."""

    def __init__(self, side: int, seconds: float) -> None:
        super().__init__(side, side, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        slowed: Tensor = _Slow.apply(super().forward(x), self.seconds)  # type: ignore[no-untyped-call]
        return slowed


class Stopwatch:
    """Sums the seconds that a method of a class takes, in place of it."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        method: Callable[..., None] = getattr(owner, name)

        def timed(*arguments: object) -> None:
            began = time.perf_counter()
            method(*arguments)
            self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def twin(backward_seconds: float, tune: bool) -> nn.Module:
    """A wrapped model of LAYERS matrices; the default plan joins an eighth of its gradients, as 25 MB are of 200."""
    module = nn.Sequential(*(SlowLinear(SIDE, backward_seconds / LAYERS) for _ in range(LAYERS)))
    layer_mb = 4 * SIDE * SIDE / 2**20
    model, _ = wrap(module, base_bucket_mb=0.9 * layer_mb, fusion=2 * layer_mb, probe=True, tune=tune)
    return model


def main(argv: list[str]) -> int:
    """Runs one rank; returns 0.

    Args:
        argv: Words after the module's name.
    """
    parser = argparse.ArgumentParser(prog="gradwire.bench.studies.tuned", description=__doc__)
    parser.add_argument("--backward-ms", type=float, default=160.0)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watches = [Stopwatch(Tuning, name) for name in ("bucket_came", "step_ended")]
    plain, tuned = (twin(options.backward_ms / 1e3, tune) for tune in (False, True))
    batch = torch.ones(1, SIDE)

    def turn(model: nn.Module, steps: int) -> float:
        """The median step of the slowest rank."""
        times = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            model(batch).sum().backward()
            times.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    turn(tuned, SEARCH_STEPS)
    turn(plain, 4)
    for watch in watches:
        watch.seconds = 0.0
    turns = [(turn(plain, STEPS), turn(tuned, STEPS)) for _ in range(TURNS)]
    before, after = (statistics.median(each) for each in zip(*turns, strict=True))
    overhead = sum(watch.seconds for watch in watches) / (TURNS * STEPS)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "plain_seconds": before,
                    "tuned_seconds": after,
                    "gain": before / after,
                    "turns": turns,
                    "overhead_seconds": overhead,
                    "overhead_share": overhead / after,
                }
            )
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
