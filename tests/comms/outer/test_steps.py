"""The steps of several optimizers are one step of training, whichever of them is skipped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.comms.outer.steps import OptimizerSteps, untrained


def two() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    matrix, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    optimizers = [torch.optim.Muon([matrix.weight]), torch.optim.SGD([matrix.bias, *norm.parameters()])]
    return nn.Sequential(matrix, norm), optimizers


@settings(deadline=None)  # the first step of an optimizer imports modules
@given(st.lists(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]), max_size=12))
def test_a_step_of_training_is_one_whoever_steps_in_it_first(rounds: list[tuple[int, ...]]) -> None:
    """Where all step in each round, there are as many steps as rounds; no optimizer can step twice in one."""
    _, optimizers = two()
    ended = [0]
    steps = OptimizerSteps(optimizers, lambda: ended.__setitem__(0, ended[0] + 1))
    taken = [0, 0]
    for numbers in rounds:
        for number in numbers:
            optimizers[number].step()
            taken[number] += 1
    steps.finish()
    assert max(taken) <= ended[0] <= len(rounds)
    if all(len(numbers) == 2 for numbers in rounds):
        assert ended[0] == len(rounds)
    steps.finish()
    steps.close()
    before = ended[0]
    for optimizer in optimizers:
        optimizer.step()
    assert ended[0] == before


def test_a_step_ends_when_the_last_of_them_has_stepped_and_not_before() -> None:
    _, (first, second) = two()
    ended: list[int] = []
    steps = OptimizerSteps([first, second], lambda: ended.append(1))
    first.step()
    assert not ended
    second.step()
    assert len(ended) == 1
    second.step()  # the first is skipped by a GradScaler
    second.step()
    assert len(ended) == 2
    first.step()
    assert len(ended) == 3
    steps.close()


def test_a_parameter_that_is_added_later_is_refused_before_it_is_trained() -> None:
    _, (first, second) = two()
    steps = OptimizerSteps([first, second], lambda: None)
    late = nn.Parameter(torch.ones(2))
    late.grad = torch.ones(2)
    second.add_param_group({"params": [late]})
    with pytest.raises(RuntimeError, match="SGD trains 4 parameters, and 3 when Outer was made"):
        second.step()
    assert late.tolist() == [1.0, 1.0]
    steps.close()


def test_what_no_optimizer_trains_is_found() -> None:
    model, (first, second) = two()
    assert untrained(model, [first, second]) == []
    assert untrained(model, [first]) == ["0.bias", "1.weight", "1.bias"]
    model[1].requires_grad_(False)  # type: ignore[index]
    assert untrained(model, [first]) == ["0.bias"]
