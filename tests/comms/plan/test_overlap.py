"""A step as a forward pass and a backward pass beside which the gradients travel."""

import pytest

from gradwire.comms.plan.overlap import compute_seconds, least_compute_seconds


def step_seconds(compute: float, exchange: float) -> float:
    """The model, as the module's header has it."""
    return compute / 3 + max(2 * compute / 3, exchange)


@pytest.mark.parametrize("compute", [0.001, 1.0, 30.0])
@pytest.mark.parametrize("exchange", [0.0, 0.5, 0.7, 3.0])
def test_what_is_computed_is_found_from_a_step(compute: float, exchange: float) -> None:
    step = step_seconds(compute, exchange)
    assert max(compute, exchange) <= step <= compute + exchange
    assert compute_seconds(step, exchange) == pytest.approx(compute)


def test_a_step_has_room_for_its_exchange() -> None:
    with pytest.raises(ValueError, match="no room for an exchange of 2 s"):
        compute_seconds(1.0, 2.0)


@pytest.mark.parametrize("nodes", [2, 3, 64])
def test_several_nodes_beat_one_from_a_step_on(nodes: int) -> None:
    least = least_compute_seconds(nodes, 1.0)
    assert nodes * least / step_seconds(least, 1.0) == pytest.approx(1.0)
    assert (
        nodes * 0.9 * least / step_seconds(0.9 * least, 1.0) < 1 < nodes * 1.1 * least / step_seconds(1.1 * least, 1.0)
    )
