"""Passes whose buckets hold what an earlier pass returned: refused if a compressor keeps a momentum, right otherwise.

One rank, for which the checks are those of ranks that compress (plan="flat").
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.compression import Compression
from gradwire.comms.step.returned import ReturnedGradients
from gradwire.compressors.base import Layout, Slice

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


class Training:
    """A model of two heads under DDP, and what a script does with it.

    Args:
        ddp: Options of DDP.
        hook: Options of gradwire's hook; None trains with plain DDP.
    """

    def __init__(self, ddp: dict[str, Any], hook: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"body": nn.Linear(16, 16), "a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        self.inner.forward = self._forward
        self.model = DistributedDataParallel(self.inner, **ddp)
        if hook is not None:
            rules = () if hook["compressor"] == "none" else RULES
            state = gradwire.HookState(self.model, plan="flat", rules=rules, **hook)
            self.model.register_comm_hook(state, gradwire.comm_hook)
        self.parameters = list(self.inner.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01)
        self._batches = torch.Generator().manual_seed(1)

    def _forward(self, batch: Tensor, heads: str) -> Tensor:
        hidden = torch.tanh(self.inner["body"](batch))
        return sum((self.inner[head](hidden).square().mean() for head in heads), torch.zeros(()))

    def loss(self, heads: str = "ab") -> Tensor:
        loss: Tensor = self.model(torch.randn(4, 16, generator=self._batches), heads)
        return loss

    def backward(self, heads: str = "ab") -> Tensor:
        loss = self.loss(heads)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def clear(self, *, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)


RULES = [{"pattern": "*.bias", "compressor": "none"}]


def passes(training: Training) -> None:
    training.clear()
    training.backward()
    training.backward()


def passes_after_zeros(training: Training) -> None:
    training.clear(to_none=False)
    training.backward()
    training.backward()


def never_cleared(training: Training) -> None:
    training.backward()


def clipped_between(training: Training) -> None:
    training.clear()
    training.backward()
    nn.utils.clip_grad_norm_(training.parameters, 0.01)
    training.backward()


def silent_between(training: Training) -> None:
    training.clear()
    training.backward()
    with training.model.no_sync():
        training.backward()
    training.backward()


def two_forwards_first(training: Training) -> None:
    training.clear()
    first = training.loss()
    first.backward()  # type: ignore[no-untyped-call]
    (training.backward() + 2 * training.loss())


REFUSED: list[Any] = [passes, passes_after_zeros, never_cleared, clipped_between, silent_between, two_forwards_first]


def one_pass(training: Training) -> None:
    training.clear()
    training.backward()


def zeros(training: Training) -> None:
    training.clear(to_none=False)
    training.backward()


def cleared_behind_forward(training: Training) -> None:
    loss = training.loss()
    training.clear()
    loss.backward()  # type: ignore[no-untyped-call]


def clipped(training: Training) -> None:
    training.clear(to_none=False)
    training.backward()
    nn.utils.clip_grad_norm_(training.parameters, 0.01)


def silent_passes(training: Training) -> None:
    training.clear()
    with training.model.no_sync():
        training.backward()
        training.backward()
    training.backward()


def silent_passes_after_zeros(training: Training) -> None:
    training.clear(to_none=False)
    with training.model.no_sync():
        training.backward()
    training.backward()


def set_by_hand(training: Training) -> None:
    for each in training.parameters:
        each.grad = torch.full_like(each, 1e-3)
    training.backward()


def replaced_by_hand(training: Training) -> None:
    training.clear()
    training.backward()
    for each in training.parameters:
        assert each.grad is not None
        each.grad = each.grad * 0.5


def other_gradients(training: Training) -> None:
    training.clear()
    training.backward()
    torch.autograd.grad(training.inner["a"](torch.ones(1, 16)).sum(), list(training.inner["a"].parameters()))


TAKEN: list[Any] = [
    one_pass,
    zeros,
    cleared_behind_forward,
    clipped,
    silent_passes,
    silent_passes_after_zeros,
    set_by_hand,
    replaced_by_hand,
    other_gradients,
]


@pytest.mark.parametrize("step", REFUSED, ids=[each.__name__ for each in REFUSED])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pass_on_top_of_an_average_is_refused_in_the_first_step_that_has_one(
    options: str, step: Callable[[Training], None]
) -> None:
    training = Training(OPTIONS[options], {"compressor": "onebit"})
    with pytest.raises(RuntimeError, match=r"(?s)still holds the average.*with model\.no_sync\(\):"):
        for _ in range(2):
            step(training)
            training.optimizer.step()


@pytest.mark.parametrize("step", TAKEN, ids=[each.__name__ for each in TAKEN])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pass_on_gradients_that_were_cleared_is_taken(options: str, step: Callable[[Training], None]) -> None:
    training = Training(OPTIONS[options], {"compressor": "onebit"})
    for _ in range(STEPS):
        step(training)
        training.optimizer.step()


@pytest.mark.parametrize("compressor", ["onebit", "dgc", "dgc+int4"])
def test_whatever_folds_in_a_momentum_refuses(compressor: str) -> None:
    training = Training({}, {"compressor": compressor})
    with pytest.raises(RuntimeError, match="still holds the average"):
        passes(training)


@pytest.mark.parametrize("compressor", ["none", "int8", "powersgd"])
def test_without_a_momentum_passes_add_up_as_in_plain_ddp(compressor: str) -> None:
    plain, hooked = Training({}, None), Training({}, {"compressor": compressor})
    for training in (plain, hooked):
        passes(training)
    for wanted, found in zip(plain.parameters, hooked.parameters, strict=True):
        assert wanted.grad is not None and found.grad is not None
        if compressor == "powersgd":  # a low rank approximates random gradients badly, and must not add them up twice
            assert found.grad.norm() < 1.5 * wanted.grad.norm()
        else:
            torch.testing.assert_close(found.grad, wanted.grad, rtol=0.05, atol=0.02 * float(wanted.grad.abs().max()))


def test_a_head_that_a_pass_does_not_use_is_handed_over_with_its_average() -> None:
    """DDP puts the `.grad` of an unused parameter into the bucket as it is."""
    training = Training({"find_unused_parameters": True}, {"compressor": "onebit"})
    training.backward("a")
    with pytest.raises(RuntimeError, match=r"`a\.weight`.*still holds the average"):
        for each in (*training.inner["body"].parameters(), *training.inner["b"].parameters()):
            each.grad = None
        training.backward("b")


def test_a_head_that_is_cleared_by_zeros_and_not_used_is_taken() -> None:
    training = Training({"find_unused_parameters": True}, {"compressor": "onebit"})
    for heads in ("ab", "a", "b", "a", "ab"):
        training.clear(to_none=False)
        training.backward(heads)


def test_parameters_whose_own_compressor_keeps_no_momentum_may_add_up() -> None:
    rules = [{"pattern": "*", "compressor": "int8"}]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16))
    state = gradwire.HookState(model, compressor="onebit", plan="flat", rules=rules)
    model.register_comm_hook(state, gradwire.comm_hook)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()


@pytest.mark.parametrize(("momentum", "warnings"), [(0.9, 1), (0.0, 0)])
def test_a_momentum_that_nothing_applies_is_warned_of_once(
    momentum: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In a job of one rank nothing is compressed: the compressor that has taken the momentum over never runs."""
    model = DistributedDataParallel(nn.Linear(16, 16))
    state = gradwire.HookState(model, compressor="dgc", compressor_options={"momentum": momentum})
    model.register_comm_hook(state, gradwire.comm_hook)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
    said = [record.getMessage() for record in caplog.records if "nothing applies the momentum" in record.getMessage()]
    assert len(said) == warnings
    assert all("this job has one rank" in text and "the momentum of dgc" in text for text in said)


def test_the_hooks_on_parameters_end_with_what_follows_them() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer(torch.ones(1, 2)).sum().backward()
    layer.weight.grad = torch.ones(1, 4)[0].view(2, 2)  # a view, as that of a bucket is
    node = get_gradient_edge(layer.weight).node  # DDP keeps these
    returned = ReturnedGradients(Compression("onebit", {}, (), 0, 1))
    returned.bucket_arrived(Layout((Slice("weight", (2, 2), 0, 0, 4),)), [layer.weight], torch.ones(4))
    (handle,) = returned._handles.values()
    hooks = handle.hooks_dict_ref()
    assert hooks
    del returned
    assert not hooks and node is not None
