"""The optimizers of the study: a task's own, or Muon for matrices inside the model and the task's own for the rest."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Muon, Optimizer

from gradwire.bench.studies.convergence.tasks import Task

MUON = "muon"
MUON_LR = 3e-3
"""Learning rate of Muon, with steps as long as AdamW's, and of AdamW for the other parameters; no other was tried."""
MUON_MOMENTUM = 0.95
"""torch's default. Source: Jordan et al., Muon (2024)."""
INSIDE = "blocks."
"""Prefix of the names of the matrices that Muon trains; embeddings and the last layer are AdamW's.

Source: Jordan et al., Muon (2024): embeddings, last layer, biases and gains are another optimizer's.
"""


def optimizers_of(task: Task, model: nn.Module, kind: str, *, lr: float = 1.0) -> list[Optimizer]:
    """Returns the optimizers of a model, Muon first; each takes one step after each backward pass.

    Args:
        task: Task whose own optimizer trains all parameters, or those that Muon does not.
        model: Model of the task.
        kind: `muon`, or the name of the task's own optimizer.
        lr: Factor of all learning rates.

    Raises:
        ValueError: The task has no such optimizer, or the model no matrix for Muon.
    """
    if kind not in (MUON, task.facts.optimizer):
        raise ValueError(f"`kind` is {kind!r}; {task.facts.name} is trained with {task.facts.optimizer} or {MUON}")
    named = list(model.named_parameters())
    matrices = [each for name, each in named if kind == MUON and name.startswith(INSIDE) and each.ndim == 2]
    if kind == MUON and not matrices:
        raise ValueError(f"`kind` is {kind!r}, and {task.facts.name} has no matrix named {INSIDE}*")
    known = {id(each) for each in matrices}
    optimizers = [task.optimizer(each for _, each in named if id(each) not in known)]
    if matrices:
        for group in groups_of(optimizers):
            group["lr"] = MUON_LR
        optimizers.insert(
            0, Muon(matrices, lr=MUON_LR, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
        )
    for group in groups_of(optimizers):
        group["lr"] *= lr
    return optimizers


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Returns the parameter groups of all optimizers."""
    return [group for each in optimizers for group in each.param_groups]
