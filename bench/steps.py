"""Run of an unchanged script for a number of optimizer steps, with a callback after each.

torch has a hook on the `step` of all optimizers at once, so that nothing in the script needs to change.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradwire.bench.meeting import GivenJob

AfterStep = Callable[[int, int, int], None]
"""Callback after a step of the script's first optimizer with (number of steps made, bytes of the gradients of all
optimizers' parameters, bytes of their trainable parameters without a gradient)."""


def run_until(steps: int, words: Sequence[str], after_step: AfterStep) -> None:
    """Runs a script as `python SCRIPT ...` would, and ends the process with status 0 right after step `steps`.

    It returns only if the script ends before. sys.argv and sys.path are those of the script from here on. If the ranks
    of the job cannot meet as the script has it, it ends the process with status 1; see `gradwire.bench.meeting`.

    Args:
        steps: Number of steps of the script's first optimizer.
        words: Script and its arguments.
        after_step: Callback after each step, in the thread that made it.
    """
    first: list[Optimizer] = []
    nbytes: dict[int, tuple[int, int]] = {}
    made = 0

    def stepped(optimizer: Optimizer, arguments: object, options: object) -> None:
        nonlocal made
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        grads = [each.grad for each in parameters if each.grad is not None]
        unused = [each for each in parameters if each.grad is None and each.requires_grad]
        nbytes[id(optimizer)] = tuple(sum(e.numel() * e.element_size() for e in each) for each in (grads, unused))
        if not first:
            first.append(optimizer)
        # A script with several optimizers makes one step for each step of the first.
        if optimizer is not first[0]:
            return
        made += 1
        after_step(made, *map(sum, zip(*nbytes.values(), strict=True)))
        if made >= steps:
            sys.stdout.flush()
            sys.stderr.flush()
            # The script's own end may be hours away, and its exit handlers may wait for other ranks.
            os._exit(0)

    hook = register_optimizer_step_post_hook(stepped)
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        with GivenJob.read().watched():
            runpy.run_path(words[0], run_name="__main__")
    finally:
        hook.remove()
