"""Notes what a training script does, from outside: every loss to the bit, and the weights after every step.

torch loads it at the end of `import torch`, by its entry point `torch.backends`, so the script needs no line for it. It
goes into a folder of its own (see job.py) and imports nothing of this project. Ranks that a launcher of the script's
starts (Ray) get their number and their host's name when they join the group. One JSON object a line:

    {"loss": "0x1.5p+1"}                          before the backward pass of a 0-dim tensor
    {"step": 3, "weights": "5f0c...", "nbytes": 7}  after the third optimizer step; bytes sent between nodes until then
"""

import hashlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

STEPS = itertools.count(1)


def install() -> None:
    """Begins to note, where REAL_SCRIPTS_RECORD names a folder."""
    if not os.environ.get("REAL_SCRIPTS_RECORD"):
        return
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # Scripts that set no seed would compute something else in each run; one of their own wins.
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    backward, join = torch.Tensor.backward, dist.init_process_group

    def joining(*args: Any, **named: Any) -> None:
        join(*args, **named)
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("GRADWIRE_HOSTNAME", f"node{dist.get_rank()}")

    def noting(tensor: Any, *args: Any, **named: Any) -> Any:
        if tensor.dim() == 0:
            note(loss=float(tensor.detach()).hex())
        return backward(tensor, *args, **named)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = noting  # type: ignore[assignment, method-assign]
    dist.init_process_group = joining
    register_optimizer_step_post_hook(after_step)


def note(**entry: object) -> None:
    """Adds a line to this rank's record; what a process without a rank does is not looked at."""
    if "RANK" not in os.environ:
        return
    path = Path(os.environ["REAL_SCRIPTS_RECORD"], os.environ["RANK"] + ".jsonl")
    with path.open("a") as record:
        record.write(json.dumps(entry) + "\n")


def after_step(optimizer: Any, args: object, named: object) -> None:
    """Notes what a step has made of the weights; ends the process where REAL_SCRIPTS_KILL_AFTER names this step."""
    step = next(STEPS)
    digest = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            digest.update(local.detach().cpu().contiguous().flatten().view(dtype=_bytes()).numpy().tobytes())
    note(step=step, weights=digest.hexdigest()[:16], nbytes=sent_between_nodes())
    if step == int(os.environ.get("REAL_SCRIPTS_KILL_AFTER", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def _bytes() -> Any:
    import torch

    return torch.uint8


def sent_between_nodes() -> int | None:
    """Bytes that gradwire's hooks of this process have sent; None where there is no hook. Each rank is a node."""
    automatic = sys.modules.get("gradwire.comms.automatic")
    if automatic is None or not automatic._models:
        return None
    rows = [row for one in list(automatic._models.values()) for row in one.state.report().rows]
    return sum(int(row.wire_nbytes) for row in rows)
