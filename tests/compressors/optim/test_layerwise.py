"""LARS and LAMB against their definitions in float64, and the laws of a step that is in proportion to the weights."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradwire

SHAPES = ((6, 5), (5,), (3, 4, 2))
Make = Callable[[list[nn.Parameter]], Optimizer]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(step: int, number: int) -> Tensor:
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * step + number))


def trained(make: Make, scale: float = 1.0, saved_after: int = 0) -> list[Tensor]:
    """The parameters after five steps; the optimizer is saved and made anew in between."""
    parameters = start()
    optimizer = make(parameters)
    for step in range(5):
        if step and step == saved_after:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = make(parameters)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        for number, parameter in enumerate(parameters):
            parameter.grad = scale * gradient(step, number)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def lars(lr: float, momentum: float, decay: float, nesterov: bool) -> list[Tensor]:
    found = []
    for number, parameter in enumerate(start()):
        w, v = parameter.detach().double(), torch.zeros(SHAPES[number], dtype=torch.float64)
        for step in range(5):
            g = gradient(step, number).double()
            rate = lr if w.dim() < 2 else lr * 0.01 * w.norm() / (g.norm() + decay * w.norm())
            update = rate * (g + decay * w)
            v = momentum * v + update
            w = w - (update + momentum * v if nesterov else v)
        found.append(w)
    return found


def lamb(lr: float, betas: tuple[float, float], decay: float) -> list[Tensor]:
    found = []
    for number, parameter in enumerate(start()):
        w = parameter.detach().double()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(5):
            g = gradient(step, number).double()
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            update = m / (1 - betas[0] ** (step + 1)) / ((v / (1 - betas[1] ** (step + 1))).sqrt() + 1e-6) + decay * w
            w = w - lr * (1.0 if w.dim() < 2 else w.norm() / update.norm()) * update
        found.append(w)
    return found


def make_lars(nesterov: bool = False) -> Make:
    return lambda parameters: gradwire.Lars(
        parameters, 0.5, momentum=0.8, weight_decay=0.02, trust=0.01, nesterov=nesterov
    )


def make_lamb(parameters: list[nn.Parameter]) -> Optimizer:
    return gradwire.Lamb(parameters, 0.05, betas=(0.8, 0.95), weight_decay=0.02)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (make_lars(), lars(0.5, 0.8, 0.02, False)),
        (make_lars(nesterov=True), lars(0.5, 0.8, 0.02, True)),
        (make_lamb, lamb(0.05, (0.8, 0.95), 0.02)),
    ],
    ids=["lars", "lars-nesterov", "lamb"],
)
def test_it_is_the_definition_and_goes_on_from_a_checkpoint(make: Make, wanted: list[Tensor]) -> None:
    found = trained(make)
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, again) for value, again in zip(found, trained(make, saved_after=3), strict=True))


def test_the_scale_of_the_gradient_does_not_matter() -> None:
    """A loss that is summed over a batch, and not averaged, trains alike; only vectors step as under SGD."""
    makes: list[Make] = [
        lambda parameters: gradwire.Lars(parameters, 0.5, trust=0.01, eps=0.0, adapt_vectors=True),
        lambda parameters: gradwire.Lamb(parameters, 0.05, eps=0.0, adapt_vectors=True),
    ]
    for make in makes:
        for value, scaled in zip(trained(make), trained(make, scale=1024.0), strict=True):
            torch.testing.assert_close(value, scaled)


def test_the_first_step_of_lamb_is_lr_of_the_weights_and_zeros_change_nothing_to_nan() -> None:
    weight = nn.Parameter(torch.randn(20, 10))
    before = weight.detach().clone()
    weight.grad = torch.randn(20, 10)
    gradwire.Lamb([weight], lr=0.1, weight_decay=0.0).step()
    assert float((weight.detach() - before).norm() / before.norm()) == pytest.approx(0.1, rel=1e-4)
    for make in (make_lars(), make_lamb):
        zero, idle = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(2, 2))
        zero.grad = torch.zeros(4, 4)
        make([zero, idle]).step()
        assert not zero.any() and torch.equal(idle, torch.ones(2, 2))  # idle has no gradient


def test_what_makes_no_sense_is_refused() -> None:
    for options, words in (({"lr": -1.0}, "`lr` is"), ({"lr": 1.0, "momentum": 1.0}, "`momentum` is"),
                           ({"lr": 1.0, "trust": 0.0}, "`trust` is"), ({"lr": 1.0, "eps": -1.0}, "`eps` is"),
                           ({"lr": 1.0, "nesterov": True, "momentum": 0.0}, "`nesterov` is on")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            gradwire.Lars(start(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`betas` are"):
        gradwire.Lamb(start(), betas=(0.9, 1.0))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"torch\.sparse_coo"):
        gradwire.Lamb(table.parameters()).step()
