"""Many schedules of one training: one after the other under delays of another seed, on connections made once.

    schedules.py BACKEND SCHEDULES CASES FOLDER     NODES has a letter for each rank; CASES as for trainings.py, of RUNS

Prints for each case the bits of the weights and the loss after each schedule, `delayed`, and `wanted`: those of the
same training without delays, on the device that the settings' `reference` names. FOLDER keeps what is wanted: other
devices want the same. The processor time of all of it is printed as `seconds`.

A schedule is a step, with `Outer` two, in which there is an exchange; the host goes on to the next ones while the
device is behind, and reads what came of them after AT_ONCE. The training is of `Layers`, few kernels on small
matrices: most of a schedule's time is gradwire's and NCCL's.
"""

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_standin.calls import Cuda
from gpu_standin.jobs.model import digest_of
from gpu_standin.jobs.trainings import LATE, RUNS, Run
from torch import Tensor
from torch.distributed.tensor import DTensor

STEPS = {"hooked": 1, "sharded": 1, "apart": 2}
"""Of a schedule."""
BATCHES = 8
"""That are trained on, again and again."""
AT_ONCE = 8
"""Schedules before the host waits for the device."""
MOST_DELAYED_US = (300, 0, 2000)
"""Taken in turns: much for a kernel of this size, nothing, and longer than a step."""


def delay(cuda: Cuda, schedule: int | None) -> None:
    """Has all streams of this process wait before their operations as a schedule's seed says; None: not at all."""
    most = 0 if schedule is None else MOST_DELAYED_US[schedule % len(MOST_DELAYED_US)]
    cuda.set("JITTER_US", str(most))
    if most:
        cuda.api.raw.gpu_standin_seed(1000 * (schedule or 0) + dist.get_rank())


def state_of(run: Run, losses: Tensor) -> Tensor:
    """What there is to compare, (numel,) float32 on the device, put together on the current stream: no wait."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in run.net.parameters()]
    return torch.cat([*(each.detach().reshape(-1) for each in here), losses])


def bits_of_schedules(device: torch.device, settings: dict[str, Any], count: int, *, delayed: bool) -> list[str]:
    """One training; what there is after each schedule."""
    cuda, steps = Cuda(), STEPS[settings["kind"]]
    delay(cuda, None)
    run, bits, states = RUNS[settings["kind"]](device, settings), list[str](), list[Tensor]()
    for schedule in range(count):
        delay(cuda, schedule if delayed else None)
        first = steps * schedule % BATCHES
        states.append(state_of(run, run.learn(device, first, first + steps)))
        if len(states) == AT_ONCE or schedule + 1 == count:
            found = [state.cpu() for state in states]
            assert all(bool(state.isfinite().all()) for state in found)
            bits += [digest_of([state]) for state in found]
            states.clear()
    delay(cuda, None)
    run.close()
    return bits


def wanted_bits(settings: dict[str, Any], count: int, folder: Path) -> list[str]:
    """What there is after each schedule without delays; kept in the folder, a file a rank."""
    described = json.dumps([os.environ["NODES"], settings, count])
    files = [folder / f"{digest_of_text(described)}-{rank}.json" for rank in range(dist.get_world_size())]
    mine = files[dist.get_rank()]
    if all(file.exists() for file in files):  # or no rank has it: they write when all have trained
        kept: list[str] = json.loads(mine.read_text())
        return kept
    kind = settings["reference"]
    device = torch.device(kind, dist.get_rank()) if kind == "cuda" else torch.device(kind)
    found = bits_of_schedules(device, settings, count, delayed=False)
    mine.write_text(json.dumps(found))
    return found


def digest_of_text(text: str) -> str:
    """A name for a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(backend: str, schedules: str, cases: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(schedules)
    torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=LATE)
    for name, settings in json.loads(cases):
        began = time.process_time()
        bits = {
            "wanted": wanted_bits(settings | {"backend": backend}, count, Path(folder)),
            "delayed": bits_of_schedules(torch.device("cuda", rank), settings, count, delayed=True),
        }
        print(json.dumps([name, bits | {"seconds": time.process_time() - began}]), flush=True)
    dist.barrier()  # rank 0 serves the store
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
