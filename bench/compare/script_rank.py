"""One rank of a user's script under `gradwire compare --script`: it trains a few steps and reports each in a line.

The script is unchanged. gradwire's hook comes from GRADWIRE_HOOK; a hook of torch is registered on each
DistributedDataParallel as it is made; the loss is what the script calls `backward()` on.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.configuration import nic_nbytes
from gradwire.bench.meeting import GivenJob
from gradwire.bench.steps import run_until
from gradwire.comms import automatic
from gradwire.comms.bootstrap.compat import comm_hook_name, ddp_models

STEP = "gradwire_step"
"""Key of the number of the step in each line of this module, by which the lines differ from the script's output."""

TORCH_HOOKS = {"torch fp16 hook": default_hooks.fp16_compress_hook, "torch bf16 hook": default_hooks.bf16_compress_hook}
"""Name of a configuration -> hook of torch that needs no state."""


def main(argv: Sequence[str]) -> None:
    """Runs the script; the process ends one step after the last that is reported.

    No rank waits for another one in a step that is reported, therefore, when the first process ends.

    Args:
        argv: Number of steps to report, name of the configuration, name of the interface whose bytes are counted (or an
            empty text), the script, and its arguments.
    """
    steps, configuration, interface, *words = argv
    job = GivenJob.read()
    losses: list[Tensor] = []
    _note_losses(losses)
    if configuration in TORCH_HOOKS:
        _register_on_all_models(TORCH_HOOKS[configuration])

    def report(step: int, nbytes: int, unused_nbytes: int) -> None:
        if step == 1 and (why := job.why_apart()) is not None:
            job.refuse(why)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The step is over when the device is done with it.
            torch.cuda.synchronize()
        record = {
            STEP: step,
            "moment": time.perf_counter(),
            "gradient_nbytes": nbytes,
            "carried": nic_nbytes(interface or None),
            "loss": float(torch.stack(losses).mean()) if losses else None,
            # A model of FSDP2 with replicas has gradwire's hook in another place than DDP's models.
            "hooks": sorted({*map(comm_hook_name, ddp_models()), *["automatic_hook"] * automatic.replicated}),
        }
        losses.clear()
        if step <= int(steps):
            # One write, so that no other output cuts the line in two; it may follow the beginning of another line.
            os.write(1, f"\n{json.dumps(record)}\n".encode())

    run_until(int(steps) + 1, words, report)


def _note_losses(losses: list[Tensor]) -> None:
    """Patches `torch.autograd.backward` so that the first tensor it starts from is appended to `losses`, if a scalar.

    Args:
        losses: List that receives the scalars: float32, shape (), without a graph.
    """
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
        root = tensors if isinstance(tensors, Tensor) else tensors[0]
        if root.numel() == 1:
            losses.append(root.detach().reshape(()).float())
        original(tensors, *arguments, **named)

    # Tensor.backward calls it by this name, too.
    setattr(torch.autograd, original.__name__, backward)


def _register_on_all_models(hook: Callable[..., torch.futures.Future[Tensor]]) -> None:
    original = DistributedDataParallel.__init__

    @wraps(original)
    def make(model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        original(model, *arguments, **named)
        model.register_comm_hook(model.process_group, hook)

    setattr(DistributedDataParallel, original.__name__, make)


if __name__ == "__main__":
    main(sys.argv[1:])
