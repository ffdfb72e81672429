"""The two-stage optimizers: Adam at first, one bit later, and a checkpoint in between that nobody notices."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.compressors.optim.onebit_adam import OneBitAdam
from gradwire.compressors.optim.onebit_lamb import OneBitLamb
from gradwire.compressors.optim.onebit_optimizer import OneBitOptimizer
from gradwire.compressors.optim.peers import Peers
from support.threads import ThreadGroup, run_ranks

TARGET = torch.linspace(-1, 1, 300)
LIVE, DEAD = slice(0, 280), slice(280, 300)
Maker = Callable[[list[Tensor], Peers, int], OneBitOptimizer]


@pytest.fixture(params=[OneBitAdam, OneBitLamb])
def maker(request: pytest.FixtureRequest) -> Maker:
    def make(parameters: list[Tensor], group: Peers, freeze_step: int) -> OneBitOptimizer:
        made = request.param(parameters, group, freeze_step=freeze_step, lr=0.01)
        assert isinstance(made, OneBitOptimizer)
        return made

    return make


def parameters() -> list[Tensor]:
    return [torch.nn.Parameter(torch.full((200,), 0.5)), torch.nn.Parameter(torch.full((10, 10), 0.5))]


def train(optimizer: torch.optim.Optimizer, weights: list[Tensor], rank: int, steps: range, bad_step: int = -1) -> None:
    """Minimises |w - target|^2 from noisy gradients; the last twenty elements never have one."""
    for step in steps:
        noise = torch.randn(300, generator=torch.Generator().manual_seed(100 * step + rank)) * 0.5
        flat = torch.cat([w.detach().view(-1) for w in weights]) - TARGET + noise
        flat[DEAD] = 0.0
        if step == bad_step and rank == 0:
            flat[7] = float("nan")
        weights[0].grad, weights[1].grad = flat[:200].clone(), flat[200:].view(10, 10).clone()
        optimizer.step()


def flat_of(weights: list[Tensor]) -> Tensor:
    return torch.cat([w.detach().view(-1) for w in weights])


def run(maker: Maker, size: int, steps: int, freeze_step: int, bad_step: int = -1) -> list[Tensor]:
    groups = ThreadGroup.create(size)

    def body(rank: int) -> Tensor:
        weights = parameters()
        train(maker(weights, groups[rank], freeze_step), weights, rank, range(steps), bad_step)
        return flat_of(weights)

    return run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 3])
def test_it_finds_the_target_and_ranks_agree(maker: Maker, size: int) -> None:
    results = run(maker, size, 400, 80)
    for other in results[1:]:
        assert torch.equal(results[0], other)
    assert float((results[0][LIVE] - TARGET[LIVE]).abs().mean()) < 0.2  # from 0.6 at the start
    assert torch.equal(results[0][DEAD], torch.full((20,), 0.5))


def test_the_first_stage_is_adamw() -> None:
    """With torch's hyper-parameters it takes torch's steps."""
    ours, theirs = parameters(), parameters()
    lr, betas, decay = 0.01, (0.9, 0.95), 0.1
    group = ThreadGroup.create(1)[0]
    train(OneBitAdam(ours, group, freeze_step=50, lr=lr, betas=betas, weight_decay=decay), ours, 0, range(20))
    train(torch.optim.AdamW(theirs, lr=lr, betas=betas, weight_decay=decay), theirs, 0, range(20))
    torch.testing.assert_close(flat_of(ours)[LIVE], flat_of(theirs)[LIVE])


def test_a_gradient_that_comes_seldom_is_not_forgotten_before_the_freeze() -> None:
    """With a memory of twenty steps the variance of a rare gradient would be gone, and its next step without limit."""
    weight, lr, freeze_step = torch.nn.Parameter(torch.zeros(8)), 0.01, 200
    optimizer = OneBitAdam([weight], ThreadGroup.create(1)[0], freeze_step=freeze_step, lr=lr, betas=(0.9, 0.95))
    for step in range(freeze_step + 50):
        weight.grad = torch.ones(8)
        weight.grad[5] = float(step in (20, freeze_step + 10))
        before = weight.detach().clone()
        optimizer.step()
        if step >= freeze_step:
            assert float((weight.detach() - before).abs().max()) < 10 * lr
    assert optimizer.flats[0].slow.numel() == 0


def test_a_long_memory_is_frozen_as_it_is() -> None:
    """Adam's default is what the paper freezes."""
    weights = parameters()
    optimizer = OneBitAdam(weights, ThreadGroup.create(1)[0], freeze_step=20, lr=0.01)
    variance = torch.zeros(300)
    for step in range(20):
        train(optimizer, weights, 0, range(step, step + 1))
        gradient = torch.cat([torch.as_tensor(w.grad).view(-1) for w in weights])
        variance = torch.addcmul(variance * 0.999, gradient, gradient, value=1.0 - 0.999)
    variance /= 1.0 - 0.999**20  # a mean over twenty steps that began at zero
    assert optimizer.frozen and torch.equal(optimizer.flats[0].variance, variance)


@pytest.mark.parametrize("bad_step", [3, 12])
def test_a_bad_gradient_changes_nothing(maker: Maker, bad_step: int) -> None:
    results = run(maker, 2, bad_step + 1, 8, bad_step)
    for ours, wanted in zip(results, run(maker, 2, bad_step, 8), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("cut", [5, 20])
def test_resume_is_no_interruption(maker: Maker, cut: int) -> None:
    size, groups = 2, ThreadGroup.create(2)
    whole = run(maker, size, 30, 10)

    def body(rank: int) -> Tensor:
        weights = parameters()
        first = maker(weights, groups[rank], 10)
        train(first, weights, rank, range(cut))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = maker(weights, groups[rank], 10)
        second.load_state_dict(torch.load(file, weights_only=True))
        train(second, weights, rank, range(cut, 30))
        return flat_of(weights)

    for ours, wanted in zip(run_ranks(size, body), whole, strict=True):
        assert torch.equal(ours, wanted)


def test_bad_arguments_are_refused(maker: Maker) -> None:
    group = ThreadGroup.create(1)[0]
    with pytest.raises(ValueError, match="`freeze_step` is 0"):
        maker(parameters(), group, 0)
    with pytest.raises(ValueError, match="`lr` is -1"):
        OneBitAdam(parameters(), group, freeze_step=1, lr=-1.0)
    with pytest.raises(TypeError, match="float64"):
        maker([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], group, 1)
    state = maker(parameters(), group, 5).state_dict()
    other = maker([torch.nn.Parameter(torch.zeros(3))], group, 5)
    with pytest.raises(ValueError, match="`state_dict"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="`state_dict"):
        other.load_state_dict({key: value for key, value in state.items() if key != "onebit"})
    del state["onebit"]["groups"][0]["slow"]
    with pytest.raises(ValueError, match="has no 'slow'"):
        maker(parameters(), group, 5).load_state_dict(state)
