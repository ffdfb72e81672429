"""What ends a rank, and what the others are told, on torch's own NCCL group with its watchdog.

    endings.py HOW PLAN TIMEOUT USERS_TIMEOUT LINGER     NODES has a letter for each rank; the last rank ends HOW

Buckets: three of unlike sizes, or BUCKETS equal ones. With BUCKETS a rank ends in the second step that is not timed, in
which flat all-reduces go directly to NCCL and each future's callback takes a stream; else in the third one, timed.

HOW: `connect` (leaves while NCCL connects), `kill` (in that step), `late` (stays away from it), `behind` (starts
the last step LINGER seconds late, while the others close at once), `none`. Every rank that is left lives on for LINGER
seconds and closes; then it prints what it has seen.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.bench.studies.gpu.backward import HandedBucket, in_backward
from gradwire.comms.hook import HookState
from gradwire.comms.step.backward_tracker import TIMED_UNTIL, is_timed
from gradwire.comms.transport.groups import Groups

NUMELS = (3000, 4097, 777) if "BUCKETS" not in os.environ else (777,) * int(os.environ["BUCKETS"])
ENDS_IN = 2 if "BUCKETS" not in os.environ else TIMED_UNTIL + 1
STEPS = ENDS_IN + 2


def leave(*unused: object) -> None:
    os._exit(7)


def main(how: str, plan: str, timeout: str, users_timeout: str, linger: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    last = rank == size - 1
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=float(users_timeout)))
    dist.all_reduce(torch.zeros(1).cuda())
    torch.cuda.synchronize()
    model = nn.ParameterList([nn.Parameter(torch.zeros(numel).cuda()) for numel in NUMELS])
    parameters = list(model)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if how == "connect" and last:
        setattr(Groups, "connect", leave)  # noqa: B010 - the type is another one
    found: dict[str, Any] = {"error": "", "seconds": 0.0, "stepped": 0, "weights": [0.0]}
    found |= {"ends_in": ENDS_IN, "timed": is_timed(ENDS_IN)}
    began, state = time.monotonic(), None
    try:
        state = HookState(
            model, plan=plan, hostname=os.environ["NODES"][rank], timeout=timedelta(seconds=float(timeout))
        )
        buffers = [torch.zeros(numel).cuda() for numel in NUMELS]
        for step in range(STEPS):
            if how == "kill" and step == ENDS_IN:  # or a device that is behind would lose an earlier step
                torch.cuda.synchronize()
            began = time.monotonic()
            if step == ENDS_IN and last:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "late":
                    time.sleep(float(linger))
            if how == "behind" and last and step == STEPS - 1:
                torch.cuda.synchronize()
                time.sleep(float(linger))
            sources = [torch.full((numel,), float(rank)).cuda() for numel in NUMELS]

            def backward(sources: list[torch.Tensor] = sources) -> None:
                futures = []
                for index, parameter in enumerate(parameters):
                    buffers[index].copy_(sources[index])
                    bucket: Any = HandedBucket(index, buffers[index], [parameter], index == len(parameters) - 1)
                    futures.append(state.reduce(bucket))

                def wait() -> None:
                    for future in futures:
                        future.wait()

                torch.autograd.Variable._execution_engine.queue_callback(wait)

            in_backward(backward)
            for parameter, buffer in zip(parameters, buffers, strict=True):
                parameter.grad = buffer
            optimizer.step()  # the host has run ahead of the device: nobody has waited for it
            found["stepped"] = step + 1
            if how == "kill" and step >= ENDS_IN:
                time.sleep(1.0)
        if how == "behind":  # the host has run ahead of the device, and of the rank that it waits for
            state.close()
        torch.cuda.synchronize()
    except RuntimeError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - began
    torch.cuda.synchronize()
    found["weights"] = [float(value) for parameter in parameters for value in parameter.detach().cpu().unique()]
    time.sleep(float(linger))
    began = time.monotonic()
    if state is not None:
        state.close()
    found["close_seconds"] = time.monotonic() - began
    found["threads"] = [each.name for each in threading.enumerate() if "connect" in each.name]
    print(json.dumps(found), flush=True)
    os._exit(0)  # a thread may still be in NCCL's init, and ranks that were given up are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
