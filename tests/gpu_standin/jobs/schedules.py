"""Many schedules of one training: every two steps under delays of another seed, on connections made once.

    schedules.py BACKEND SCHEDULES CASES     NODES has a letter for each rank; CASES as for trainings.py, of RUNS

Prints for each case the bits of the weights after each schedule, `delayed`, and `wanted`: those of the same training
without delays, on the device that the settings' `reference` names.
"""

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from gpu_standin.calls import Cuda
from gpu_standin.jobs.model import digest_of
from gpu_standin.jobs.trainings import LATE, RUNS

STEPS = 2
"""Of a schedule: the second one is issued while the first one's kernels may still be waiting."""
MOST_DELAYED_US = (300, 0, 2000)
"""Taken in turns: much for a kernel of this size, nothing, and longer than a step."""


def delay(cuda: Cuda, schedule: int | None) -> None:
    """Has all streams of this process wait before their operations as a schedule's seed says; None: not at all."""
    most = 0 if schedule is None else MOST_DELAYED_US[schedule % len(MOST_DELAYED_US)]
    cuda.set("JITTER_US", str(most))
    if most:
        cuda.api.raw.gpu_standin_seed(1000 * (schedule or 0) + dist.get_rank())


def bits_of_schedules(device: torch.device, settings: dict[str, Any], count: int, *, delayed: bool) -> list[str]:
    """One training; what the weights are after each schedule."""
    cuda = Cuda()
    delay(cuda, None)
    run, bits = RUNS[settings["kind"]](device, settings), []
    for schedule in range(count):
        delay(cuda, schedule if delayed else None)
        losses = run.learn(device, STEPS * schedule, STEPS * (schedule + 1))
        bits.append(digest_of([*run.net.parameters(), losses]))
        assert bool(losses.isfinite().all())
    delay(cuda, None)
    run.close()
    return bits


def main(backend: str, schedules: str, cases: str) -> None:
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(schedules)
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=LATE)
    for name, settings in json.loads(cases):
        reference = torch.device("cuda", rank) if settings["reference"] == "cuda" else torch.device("cpu")
        bits = {
            "wanted": bits_of_schedules(reference, settings, count, delayed=False),
            "delayed": bits_of_schedules(torch.device("cuda", rank), settings, count, delayed=True),
        }
        print(json.dumps([name, bits]), flush=True)
    dist.barrier()  # rank 0 serves the store
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
