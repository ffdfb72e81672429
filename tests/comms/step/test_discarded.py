"""Passes whose gradients are thrown away are warned of where a compressor keeps residuals, and only there.

One rank, whose buckets are compressed all the same (plan="flat").
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.step.discarded import MOST_DISCARDED, MOST_PASSES, SAMPLE_NBYTES

pytestmark = pytest.mark.usefixtures("alone")


class Training:
    """A discriminator, or any model, with its optimizer."""

    def __init__(self, compressor: str, lr: float, **ddp: Any) -> None:
        layers = (nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001, **ddp)
        options: dict[str, Any] = {"momentum": 0.0, "warmup_steps": 1} if compressor == "dgc" else {}
        self.state = gradwire.HookState(self.model, plan="flat", compressor=compressor, compressor_options=options)
        self.model.register_comm_hook(self.state, gradwire.comm_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def backward(self) -> None:
        self.model(torch.ones(2, 16)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


def of_a_gan(training: Training) -> None:
    training.step()
    training.backward()  # the generator's loss; its gradients here are cleared by the next step


def of_a_gan_with_zeros(training: Training) -> None:
    """As the tutorial has it: two passes for the discriminator's loss; gradients are cleared by zeros."""
    training.optimizer.zero_grad(set_to_none=False)
    training.backward()
    training.backward()
    training.optimizer.step()
    training.backward()


def of_a_critic(training: Training) -> None:
    for _ in range(5):
        training.step()
    training.backward()


def of_a_gan_silently(training: Training) -> None:
    training.step()
    with training.model.no_sync():
        training.backward()


def usual(training: Training) -> None:
    training.step()


def accumulated(training: Training) -> None:
    training.optimizer.zero_grad()
    for _ in range(3):
        training.backward()
    training.optimizer.step()


def sharpness_aware(training: Training) -> None:
    training.optimizer.zero_grad()
    training.backward()
    with torch.no_grad():
        for each in training.model.parameters():
            each.add_(0.01)
    training.step()


def behind_autograd(training: Training) -> None:
    """An optimizer that writes to `.data`."""
    training.model.zero_grad()
    training.backward()
    for each in training.model.parameters():
        assert each.grad is not None
        each.data.sub_(each.grad, alpha=0.1)


def skipped_in_a_row(training: Training) -> None:
    """As a GradScaler that finds its scale, once in thousands of steps."""
    for _ in range(5):
        training.model.zero_grad()
        training.backward()
    for _ in range(MOST_PASSES // 2):
        training.step()


Pattern = Callable[[Training], None]


def said(caplog: pytest.LogCaptureFixture, pattern: Pattern, compressor: str, **ddp: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "gradwire"):
        torch.manual_seed(0)
        training = Training(compressor, 0.1, **ddp)
        for _ in range(3 * MOST_DISCARDED):
            pattern(training)
        training.state.close()
    return [each.getMessage() for each in caplog.records if "are cleared without a step" in each.getMessage()]


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("compressor", ["int8", "powersgd", "dgc"])
@pytest.mark.parametrize("pattern", [of_a_gan, of_a_gan_with_zeros, of_a_critic])
def test_gradients_that_are_thrown_away_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, pattern: Pattern, compressor: str, ddp: dict[str, Any]
) -> None:
    (text,) = said(caplog, pattern, compressor, **ddp)
    assert f"Compressor '{compressor}'" in text and "parameter `" in text and "with model.no_sync():" in text


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(
    "pattern", [of_a_gan_silently, usual, accumulated, sharpness_aware, behind_autograd, skipped_in_a_row]
)
def test_passes_that_are_used_or_not_sent_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, pattern: Pattern, ddp: dict[str, Any]
) -> None:
    assert not said(caplog, pattern, "int8", **ddp)


@pytest.mark.parametrize("compressor", ["none", "fp16"])
def test_nothing_is_warned_of_where_no_residual_is_kept(caplog: pytest.LogCaptureFixture, compressor: str) -> None:
    assert not said(caplog, of_a_gan, compressor)


def test_a_parameter_that_is_frozen_or_empty_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    training = Training("int8", 0.1, find_unused_parameters=True)
    training.step()
    first = next(iter(training.model.parameters()))
    assert first.grad is not None  # stays, though nothing is accumulated into it any more
    first.requires_grad_(False)
    for _ in range(3 * MOST_DISCARDED):
        training.step()
    training.state.close()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(0, 16), nn.Linear(16, 16)))
    state = gradwire.HookState(model, plan="flat", compressor="int8")
    model.register_comm_hook(state, gradwire.comm_hook)
    for _ in range(3 * MOST_DISCARDED):
        model.zero_grad()
        model(torch.ones(2, 0)).sum().backward()
        for each in model.parameters():
            assert each.grad is not None
            each.data.sub_(each.grad, alpha=0.1)
    state.close()
    assert not [each for each in caplog.messages if "are cleared without a step" in each]


def test_a_gradient_that_is_zero_but_for_a_few_rows_is_no_cleared_one(caplog: pytest.LogCaptureFixture) -> None:
    """Rows beyond those that are looked at first: accumulated over three passes, and never cleared in between."""
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(SAMPLE_NBYTES, 1), nn.Linear(1, 4)))
    state = gradwire.HookState(model, plan="flat", compressor="int8")
    model.register_comm_hook(state, gradwire.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3 * MOST_DISCARDED):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.tensor([SAMPLE_NBYTES - 1])).sum().backward()
        optimizer.step()
    state.close()
    assert "are cleared without a step" not in caplog.text
