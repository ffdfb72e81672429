"""Law: messages that share links fairly need at least what the formula says, and no staleness is plain training."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gradwire.bench.studies.exchanges.parameter_server import (
    StaleUpdates,
    asynchronous_run,
    best_shares,
    exchange_seconds,
    limit_seconds,
)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("servers", [0, 1, 4])
def test_an_exchange_takes_the_busiest_link_and_a_piece_or_more(workers: int, servers: int) -> None:
    rates = [2.0] * workers + [1.0] * servers
    rates[0] = 0.75
    shares = best_shares(rates, workers)
    assert sum(shares) == pytest.approx(1)
    limit = limit_seconds(rates, workers, shares)
    # Any other owner of a thousandth makes the busiest link busier, or leaves it as it is.
    for giver in range(len(rates)):
        for taker in range(len(rates)):
            moved = list(shares)
            amount = min(0.001, moved[giver])
            moved[giver], moved[taker] = moved[giver] - amount, moved[taker] + amount
            assert limit_seconds(rates, workers, moved) >= limit * (1 - 1e-9)
    assert exchange_seconds(rates, workers, shares, 6.0, pieces=4) >= 6 * limit * (1 - 1e-9)


def test_the_limits_are_those_of_the_source() -> None:
    for workers, servers in ((4, 1), (4, 4), (8, 2)):
        alone = [0.0] * workers + [1 / servers] * servers
        rates = [1.0] * (workers + servers)
        assert limit_seconds(rates, workers, alone) == pytest.approx(max(1, workers / servers))
        nodes = [1.0] * workers
        assert limit_seconds(nodes, workers, best_shares(nodes, workers)) == pytest.approx(2 * (workers - 1) / workers)
        both = 2 * workers * (workers - 1) / (workers**2 + servers * workers - 2 * servers)
        assert limit_seconds(rates, workers, best_shares(rates, workers)) == pytest.approx(max(both, 1.0))


def test_equal_workers_are_n_minus_one_updates_behind() -> None:
    run = asynchronous_run([1.0] * 5, [10.0] * 5, 50.0, 1.0, updates=100)
    assert run.staleness == run.stalest == 4
    assert run.updates_per_second == pytest.approx(5 / 1.2, rel=0.05)  # a gradient out and the parameters in: 0.2 s


def test_an_update_takes_the_gradient_of_as_many_updates_before() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    updates = StaleUpdates(model, SGD(model.parameters(), lr=1.0), 2)
    seen = []
    for gradient in (1.0, 10.0, 100.0, 1000.0):
        model.zero_grad(set_to_none=True)
        (model.weight * gradient).sum().backward()  # type: ignore[no-untyped-call]
        updates.step()
        seen.append(-model.weight.item())
    assert seen == [0, 0, 1, 11]
    assert torch.isfinite(model.weight).all()
