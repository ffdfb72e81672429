"""Inputs: the reduction is exact in any order, in every type, and a wrong element is counted."""

import itertools
import random

import pytest
import torch

from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, NO_ARITHMETIC, ElementType
from gradwire.bench.nccl_tests.verify import PERIOD, ExactInputs, count_wrong

REDUCING = [element for element in ELEMENT_TYPES.values() if element.torch not in NO_ARITHMETIC]


def reduce_in_order(values: list[torch.Tensor], operation: str) -> torch.Tensor:
    """Reduces one after the other in the type itself, as a ring does."""
    total = values[0].clone() * (2 if operation == "mulsum" else 1)
    for value in values[1:]:
        if operation in ("sum", "avg"):
            total = total + value
        elif operation == "mulsum":
            total = total + value * 2
        elif operation == "prod":
            total = total * value
        else:
            total = torch.maximum(total, value) if operation == "max" else torch.minimum(total, value)
    return total


@pytest.mark.parametrize("element", REDUCING, ids=lambda element: element.name)
@pytest.mark.parametrize("operation", ["sum", "prod", "max", "min", "mulsum"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 32])
def test_any_order_gives_the_expected_bits(element: ElementType, operation: str, ranks: int) -> None:
    inputs = ExactInputs(ranks, element, operation, seed=3)
    values = [inputs.of(rank, 11, PERIOD + 50) for rank in range(ranks)]
    expected = inputs.reduced(11, PERIOD + 50)
    shuffler = random.Random(5)
    for _ in range(3):
        shuffler.shuffle(values)
        assert torch.equal(reduce_in_order(values, operation), expected)
        assert count_wrong(reduce_in_order(values, operation), expected, inputs) == 0


@pytest.mark.parametrize("element", ELEMENT_TYPES.values(), ids=lambda element: element.name)
def test_one_changed_element_is_counted(element: ElementType) -> None:
    inputs = ExactInputs(4, element, "none", seed=0)
    right = inputs.of(1, 0, 1000)
    changed = right.clone()
    raw = changed.view(torch.uint8)
    raw[17 * element.nbytes] ^= 1
    assert count_wrong(right, right, inputs) == 0
    assert count_wrong(changed, right, inputs) == 1


def test_not_a_number_is_wrong_even_for_averages() -> None:
    inputs = ExactInputs(3, ELEMENT_TYPES["float"], "avg", seed=0)
    expected = inputs.reduced(0, 10)
    found = expected.clone()
    found[4] = float("nan")
    assert count_wrong(found, expected, inputs) == 1


def test_ranks_and_seeds_have_inputs_of_their_own() -> None:
    float32 = ELEMENT_TYPES["float"]
    every = [ExactInputs(4, float32, "sum", seed).of(rank, 0, 512) for seed in range(3) for rank in range(4)]
    for left, right in itertools.combinations(every, 2):
        assert (left == right).float().mean() < 0.1


def test_a_slice_from_the_wrong_place_shows() -> None:
    inputs = ExactInputs(2, ELEMENT_TYPES["float"], "sum", seed=0)
    right = inputs.reduced(0, 1 << 16)
    for shift in (1, 2, 16, 1024, 4096, 1 << 15):
        assert count_wrong(right.roll(shift), right, inputs) > 0.9 * right.numel()
