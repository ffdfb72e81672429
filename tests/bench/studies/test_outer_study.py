"""The study of Outer: an outer SGD around one worker's own steps."""

import torch
from torch import nn

from gradwire.bench.studies.convergence.outer import OuterSgd


def stepped(every: int, lr: float, momentum: float, inner: list[float]) -> list[float]:
    """Returns a model's only parameter after each inner step, which adds a number to it, and the outer SGD."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    outer = OuterSgd(model, every, lr, momentum, fragments=4)
    found = []
    for change in inner:
        with torch.no_grad():
            model.weight += change
        outer.step()
        found.append(round(model.weight.item(), 6))
    return found


def test_without_momentum_and_at_rate_one_the_inner_steps_are_left_alone() -> None:
    assert stepped(2, 1.0, 0.0, [1.0, 2.0, 4.0, 8.0]) == [1.0, 3.0, 7.0, 15.0]


def test_an_outer_step_is_torchs_nesterov_step_from_the_parameters_of_the_last_one() -> None:
    # The first pseudo-gradient is -3, its step 0.5 * (3 + 0.5 * 3); the second is -12, of momentum 12 + 0.5 * 3.
    first = 0.5 * (3 + 0.5 * 3)
    second = first + 0.5 * (12 + 0.5 * (12 + 0.5 * 3))
    assert stepped(2, 0.5, 0.5, [1.0, 2.0, 4.0, 8.0]) == [1.0, first, first + 4.0, second]
