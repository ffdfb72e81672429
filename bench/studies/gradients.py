"""Saves gradients of both convergence tasks at some steps of a training, for `gradwire bench codecs --gradients FILE`.

    python -m gradwire.bench.studies.gradients gradients.npz [--steps 20,200,600]

Feeds docs/results/number_formats.md. One process computes the mean gradient of a node of two ranks, which is what a
codec sees; the mean of all four ranks steps the optimizer. An entry is one node's whole gradient, flat, in the order of
the parameters.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradwire.bench.studies.convergence.tasks import RANKS, TASKS, Task, schedules_of
from gradwire.bench.studies.shared.parser import StudyParser

STEPS = (20, 200, 600)
"""Steps whose gradients are saved: soon after the start, while the loss falls fast, and late."""


def _gradient(task: Task, model: nn.Module, step: int, rank: int) -> Tensor:
    model.zero_grad()
    task.loss(model, step, rank, 0).backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None])


def gradients(task: Task, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Trains a model by plain averaging and yields the first node's gradient at some steps.

    Args:
        task: Task to train; its data are loaded here.
        steps: Numbers of the steps, ascending, each below the task's own number of steps.

    Yields:
        (step, 1-D float32 gradient with as many elements as the model has parameters).
    """
    task.load()
    model = task.model(0)
    optimizer = task.optimizer(model.parameters())
    (schedule,) = schedules_of([optimizer], task.facts.steps)
    for step in range(steps[-1] + 1):
        each = [_gradient(task, model, step, rank) for rank in range(RANKS)]
        if step in steps:
            yield step, (each[0] + each[1]) / 2
        mean = torch.stack(each).mean(0)
        start = 0
        for parameter in model.parameters():
            parameter.grad = mean[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        optimizer.step()
        schedule.step()


def main() -> None:
    """Trains both tasks as far as needed and writes the gradients to a NumPy archive, by `TASK/STEP`."""
    parser = StudyParser("gradients", __doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="of the training, ascending")
    options = parser.parse_args()
    steps = [int(word) for word in options.steps.split(",")]
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, make in TASKS.items():
        for step, gradient in gradients(make(), steps):
            found[f"{name}/{step}"] = gradient.numpy()
            print(f"{name}, step {step}: {gradient.numel()} elements", flush=True)
    np.savez(options.file, **found)  # type: ignore[arg-type]  # numpy's stubs take the names for its own options


if __name__ == "__main__":
    main()
