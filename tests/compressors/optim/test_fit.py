"""Pairs of compressor and optimizer, and the momentum's move."""

import warnings

import pytest
import torch
from torch import Tensor

from gradwire.compressors.dense import Dense
from gradwire.compressors.optim.fit import check_optimizer, take_momentum
from gradwire.compressors.registry import Option


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize("compressor", ["onebit", "dgc"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_adaptive_optimizers_are_refused(compressor: str, name: str) -> None:
    optimizer = getattr(torch.optim, name)(weights(), lr=0.1)
    with pytest.raises(ValueError, match=rf"`optimizer` is {name}.*Use SGD, or one of"):
        check_optimizer(compressor, optimizer)


@pytest.mark.parametrize("compressor", ["onebit", "dgc"])
def test_momentum_on_both_sides_is_refused(compressor: str) -> None:
    with pytest.raises(ValueError, match=r"momentum 0.9.*take_momentum"):
        check_optimizer(compressor, torch.optim.SGD(weights(), lr=0.1, momentum=0.9))


def test_momentum_after_signs_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="amplifies the compression error") as said:
        check_optimizer("onebit", torch.optim.SGD(weights(), lr=0.1, momentum=0.9), {"momentum": 0.0})
    assert [each.filename for each in said] == [__file__]


@pytest.mark.parametrize("compressor", ["none", "fp16", "bf16", "int8", "int4", "powersgd"])
def test_faithful_compressors_fit_everything(compressor: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(compressor, torch.optim.AdamW(weights(), lr=0.1))
        check_optimizer(compressor, torch.optim.SGD(weights(), lr=0.1, momentum=0.9))
        check_optimizer("dgc", torch.optim.SGD(weights(), lr=0.1))


@pytest.mark.parametrize(
    ("compressor", "enough", "behind", "kind"),
    [("powersgd", {"rank": 16}, {}, torch.optim.AdamW), ("dgc", {}, {"density": 0.001}, torch.optim.SGD)],
)
def test_what_ends_behind_says_so_once_in_the_log(
    compressor: str,
    enough: dict[str, Option],
    behind: dict[str, Option],
    kind: type[torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_optimizer(compressor, kind(weights(), lr=0.1), enough)  # type: ignore[call-arg]
    check_optimizer("powersgd", torch.optim.SGD(weights(), lr=0.1))
    assert not caplog.records
    check_optimizer(compressor, kind(weights(), lr=0.1), behind)  # type: ignore[call-arg]
    (said,) = caplog.records
    assert said.levelname == "WARNING" and f"compressor '{compressor}'" in said.getMessage()
    assert "is known to" in said.getMessage()


@pytest.mark.parametrize(
    ("compressor", "options", "bits"),
    [
        ("int4", {}, "0.04"),
        ("waterfill4", {}, "0.03"),
        ("waterfill3", {}, "0.06"),
        ("waterfill2", {}, "0.15"),
        ("powersgd", {"rank": 16}, "0.05"),
        ("powersgd", {"rank": 4}, "0.21"),
        ("int8", {}, ""),
        ("fp16", {}, ""),
    ],
)
def test_what_muon_makes_worse_is_named_with_its_figure(
    compressor: str, options: dict[str, Option], bits: str, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = [torch.nn.Parameter(torch.ones(4, 4))]
    check_optimizer(compressor, torch.optim.AdamW(matrix), options)
    behind = [
        "under AdamW is known to reach a higher loss: a small transformer by 0." in each for each in caplog.messages
    ]
    assert behind == ([True] if compressor == "waterfill2" or options.get("rank") == 4 else [])
    caplog.clear()
    check_optimizer(compressor, torch.optim.Muon(matrix), options)
    assert [
        f"under Muon is known to reach a higher loss: a small transformer by {bits} bits" in one
        for one in caplog.messages
    ] == ([True] if bits else [])


@pytest.mark.parametrize(
    ("compressor", "options", "bits"),
    [("onebit", {}, "0.37"), ("dgc", {}, "0.49"), ("dgc", {"density": 0.001}, "0.64")],
)
def test_what_folds_the_momentum_in_is_named_under_muon_without_one(
    compressor: str, options: dict[str, Option], bits: str, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = [torch.nn.Parameter(torch.ones(4, 4))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # not "untested", too: it was measured
        check_optimizer(compressor, torch.optim.Muon(matrix, momentum=0.0), options)
    (said,) = caplog.messages
    assert f"under Muon is known to reach a higher loss: a small transformer by {bits} bits" in said


def sgd_path(optimizer: torch.optim.Optimizer, w: torch.nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        w.grad = gradient.clone()
        optimizer.step()
    return w.detach().clone()


@pytest.mark.parametrize("nesterov", [False, True])
def test_moved_momentum_takes_the_same_path(nesterov: bool) -> None:
    """SGD with momentum on the gradients == SGD without on what the momentum before the compression returns."""
    gradients = [torch.randn(4, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    (w,), (moved,) = weights(), weights()
    wanted = sgd_path(torch.optim.SGD([w], lr=0.1, momentum=0.8, nesterov=nesterov), w, gradients)
    optimizer = torch.optim.SGD([moved], lr=0.1, momentum=0.8, nesterov=nesterov)
    options = take_momentum(optimizer)
    assert options == {"momentum": 0.8, **({"nesterov": True} if nesterov else {})}
    velocity, sent = torch.zeros(4), []
    for gradient in gradients:
        velocity = 0.8 * velocity + gradient
        sent.append(gradient + 0.8 * velocity if nesterov else velocity)
    torch.testing.assert_close(sgd_path(optimizer, moved, sent), wanted)
    assert Dense(momentum=0.8, nesterov=nesterov).momentum == 0.8


def test_only_a_plain_momentum_is_moved() -> None:
    with pytest.raises(TypeError, match="Adam"):
        take_momentum(torch.optim.Adam(weights()))
    with pytest.raises(ValueError, match="no dampening"):
        take_momentum(torch.optim.SGD(weights(), lr=0.1, momentum=0.9, dampening=0.5))
    with pytest.raises(ValueError, match="momentum 0"):
        take_momentum(torch.optim.SGD(weights(), lr=0.1))
    mixed = torch.optim.SGD([{"params": weights(), "momentum": 0.9}, {"params": weights(), "momentum": 0.5}], lr=0.1)
    with pytest.raises(ValueError, match="different"):
        take_momentum(mixed)
