"""Law: an optimizer that does not fit the compressor takes no step, one that fits takes all of them."""

import gc
import warnings

import pytest
import torch
from torch import nn

from gradwire.compressors import first_step
from gradwire.compressors.first_step import check_at_first_step
from gradwire.compressors.fit import take_momentum
from gradwire.compressors.registry import Option, names

ADAPTIVE = ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Adafactor"]


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def take_steps(optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        optimizer.step()


@pytest.mark.parametrize("compressor", names())
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_signs_and_selections_are_refused_under_adaptive_optimizers(compressor: str, kind: str) -> None:
    model = model_with_gradients()
    before = model.weight.detach().clone()
    check_at_first_step(model, compressor, {})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    if compressor not in ("onebit", "dgc"):
        take_steps(optimizer)
        assert not torch.equal(model.weight, before)
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"`optimizer` is {kind} with compressor '{compressor}'.*OneBitAdam"):
            optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("compressor", names())
def test_momentum_on_both_sides_is_refused_until_it_is_moved(compressor: str) -> None:
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Option] = {}
    check_at_first_step(model, compressor, options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if compressor in ("onebit", "dgc"):
            with pytest.raises(ValueError, match="take_momentum"):
                optimizer.step()
            take_momentum(optimizer)
        take_steps(optimizer)


def test_an_optimizer_nobody_knows_is_warned_of_once() -> None:
    model = model_with_gradients()
    check_at_first_step(model, "onebit", {})
    optimizer = torch.optim.ASGD(model.parameters())
    with pytest.warns(UserWarning, match="ASGD is untested"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer)


def test_other_models_are_not_looked_at() -> None:
    model, other = model_with_gradients(), model_with_gradients()
    check_at_first_step(model, "onebit", {})
    take_steps(torch.optim.Adam(other.parameters()))


def test_nothing_is_left_behind() -> None:
    before = len(first_step._unseen)
    passed, forgotten = model_with_gradients(), model_with_gradients()
    for model in (passed, forgotten):
        first_step.check_at_first_step(model, "fp16", {})
    assert len(first_step._unseen) == before + 2
    take_steps(torch.optim.Adam(passed.parameters()), 1)
    del model, forgotten
    gc.collect()
    assert len(first_step._unseen) == before
