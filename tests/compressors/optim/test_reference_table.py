"""The table of optimizers in docs/reference/compressors.md says what the check at the first step does."""

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.compressors import registry
from gradwire.compressors.optim.fit import check_optimizer

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "compressors.md"


class Lamb(torch.optim.Adam):
    """Named as `gradwire.Lamb`."""


class Dion(torch.optim.SGD):
    """Named as the package `dion` has it."""


class Lion(torch.optim.Optimizer):
    """One of the others."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(8, 8))]


OPTIMIZERS: dict[str, list[torch.optim.Optimizer]] = {
    "SGD without momentum": [torch.optim.SGD(weights())],
    "SGD with momentum": [torch.optim.SGD(weights(), momentum=0.9)],
    "Adam, AdamW, LAMB, RMSprop, Adagrad, ...": [
        kind(weights())
        for kind in (torch.optim.Adam, torch.optim.AdamW, Lamb, torch.optim.RMSprop, torch.optim.Adagrad)
    ],
    "Muon, Dion": [torch.optim.Muon(weights()), Dion(weights(), momentum=0.9)],
    "others": [Lion(weights()), torch.optim.Rprop(weights())],
}
"""What stands for each row."""


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Row -> (refused, warned of)."""
    part = PAGE.read_text().partition("## Which optimizer fits")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    return {name: (set(names(refused)), set(names(warned))) for name, refused, warned in rows[1:]}


def names(cell: str) -> list[str]:
    return [each for each in re.findall(r"`(\w+)`", cell) if each in registry.BUILT_IN]


def answer(name: str, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING, logger="gradwire"):
        warnings.simplefilter("always")
        try:
            check_optimizer(name, optimizer)
        except ValueError:
            return "refused"
    return "warned of" if warned or caplog.records else "fits"


def test_every_row_stands_for_optimizers_that_are_tried() -> None:
    assert list(table()) == list(OPTIMIZERS)


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_a_row_says_what_the_check_does_with_default_options(row: str, caplog: pytest.LogCaptureFixture) -> None:
    refused, warned = table()[row]
    for name in registry.BUILT_IN:
        said = "refused" if name in refused else "warned of" if name in warned else "fits"
        for optimizer in OPTIMIZERS[row]:
            assert answer(name, optimizer, caplog) == said, (name, type(optimizer).__name__)
