"""Law: what is recommended first is refused, warned of or known to reach a higher loss under no optimizer it is for.

Who recommends: `predict`, `advise()`, the rows of `make run`, and doctor. Who contradicts:
the check at the optimizer's first step, its warnings and its log.
"""

import copy
import csv
import inspect
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.bench.doctor import show
from gradwire.bench.train import main_job
from gradwire.cli.predict import OPTIMIZERS
from gradwire.comms.plan.advise import (
    ANY_OPTIMIZER,
    LEAST_DISTORTION_FIRST,
    SGD_ONLY,
    TRIED_OPTIMIZERS,
    UNLIKE_OPTIMIZERS,
    Advice,
    Workload,
    advise,
    condition_of,
    warning_of,
)
from gradwire.comms.plan.codec_price import CODEC_FACTS, codec_price, square_layout
from gradwire.compressors import registry
from gradwire.compressors.optim.fit import check_optimizer, take_momentum
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster

GRADIENT_NBYTES = 113_200_000


class Lion(torch.optim.Optimizer):
    """One of others, with no second moment."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})


class Lamb(torch.optim.Adam):
    """One that is adaptive."""


class Dion(torch.optim.SGD):
    """One that makes momenta orthogonal, outside torch."""


def optimizers() -> Iterator[torch.optim.Optimizer]:
    """Each class of torch's, and some of others, on a matrix."""
    kinds: list[Any] = [each for _, each in inspect.getmembers(torch.optim, inspect.isclass)]
    for kind in [*kinds, Lion, Lamb, Dion]:
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield kind([nn.Parameter(torch.zeros(8, 8))])
    yield torch.optim.SGD([nn.Parameter(torch.zeros(8, 8))], lr=0.1, momentum=0.9)
    yield Dion([nn.Parameter(torch.zeros(8, 8))], lr=0.1, momentum=0.9)


EACH = [(f"{type(each).__name__} {each.defaults.get('momentum', '')}".strip(), each) for each in optimizers()]


def complaints(compressor: str, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the check at the first step says: refusals, warnings, and lines of the log."""
    caplog.clear()
    options = {}
    if compressor in SGD_ONLY and optimizer.defaults.get("momentum"):
        optimizer = copy.deepcopy(optimizer)
        options = take_momentum(optimizer)  # what the recommendation says to write
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING, logger="gradwire"):
        warnings.simplefilter("always")
        try:
            check_optimizer(compressor, optimizer, options)
        except ValueError as error:
            return [str(error)]
    return [str(each.message) for each in warned] + [each.getMessage() for each in caplog.records]


def cluster_of(nodes: int, gbit: float, ranks: int = 8) -> Cluster:
    inside, nic = Link(4e-6, 235e9), Link(30e-6, gbit * 1e9 / 8, 1, 2)
    return uniform_cluster((ranks, nodes), (Level(LEVEL_NAMES[0], inside), Level(LEVEL_NAMES[1], nic)))


CASES = [
    (nodes, gbit, backward_ms, library)
    for nodes, gbit, backward_ms in (
        (2, 0.01, 50), (2, 0.1, 50), (2, 1, 0), (2, 1, 180), (4, 0.1, 5), (4, 1, 5000), (4, 10, 20), (8, 1, 300),
    )
    for library in ("nccl", "gloo")
]  # fmt: skip
PRICES = {
    nodes: [codec_price(name, square_layout(GRADIENT_NBYTES), nodes, 1.4e12) for name in LEAST_DISTORTION_FIRST]
    for nodes in (2, 4, 8)
}


def advice(case: tuple[int, float, float, str], optimizer: str) -> Advice:
    nodes, gbit, backward_ms, library = case
    workload = Workload(GRADIENT_NBYTES, backward_ms / 1e3, optimizer=optimizer)
    return advise(cluster_of(nodes, gbit), workload, PRICES[nodes], library=library)


def recommended(optimizer: str) -> dict[str, set[str]]:
    """Compressor -> with which words it is recommended; asked once for all optimizers that the same speaks against."""
    against = tuple(bool(warning_of(name, optimizer)) for name in LEAST_DISTORTION_FIRST)
    if against not in _recommended or optimizer == ANY_OPTIMIZER:
        _recommended[against] = _ask(optimizer)
    return _recommended[against]


_recommended: dict[tuple[bool, ...], dict[str, set[str]]] = {}


def _ask(optimizer: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case in CASES:
        verdict = advice(case, optimizer).recommend
        found.setdefault(verdict.compressor, set()).add(verdict.why)
    return found


@pytest.mark.parametrize("optimizer", [each for _, each in EACH], ids=[name for name, _ in EACH])
def test_what_is_recommended_for_an_optimizer_is_accepted_without_a_word(
    optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture
) -> None:
    found = recommended(type(optimizer).__name__)
    assert len(found) > 1, "on these links something is worth while"
    for name in found:
        assert complaints(name, optimizer, caplog) == [], name


def test_without_an_optimizer_the_words_name_those_under_which_it_ends_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, reasons in recommended(ANY_OPTIMIZER).items():
        for _, optimizer in EACH:
            if complaints(name, optimizer, caplog):
                kind = type(optimizer).__name__.replace("Dion", "Muon")  # the same family, by its best known name
                assert all(f"Under {kind} it ends at a higher loss" in each for each in reasons), (name, reasons)
                assert kind.lower() in UNLIKE_OPTIMIZERS


def test_a_compressor_that_takes_the_momentum_is_recommended_with_the_line_that_moves_it() -> None:
    found = [advice(case, "sgd") for case in CASES]
    taking = [each for each in found if each.recommend.compressor in SGD_ONLY]
    assert taking, "on the slowest links SGD is told of one"
    for each in taking:
        assert "compressor_options=gradwire.take_momentum(optimizer)" in each.recommend.write
        assert condition_of(each.recommend.compressor, "sgd") in each.recommend.why


def test_the_table_of_compressors_has_an_empty_cell_for_what_was_never_trained() -> None:
    table = Path(__file__).parents[1] / "docs" / "results" / "data" / "compressors" / "quality.csv"
    titles = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
    rows = list(csv.DictReader(table.read_text().splitlines()))
    for name in {row["compressor"].split("`")[1] for row in rows}:
        for optimizer, title in titles.items():
            cells = {row[title] for row in rows if row["compressor"].split("`")[1] == name}
            assert bool(cells - {"", "refused"}) == (optimizer in CODEC_FACTS[name].trained), (name, optimizer)
            assert optimizer in CODEC_FACTS[name].trained or warning_of(name, optimizer), (name, optimizer)


def test_predict_knows_every_optimizer_that_advice_tells_apart() -> None:
    assert {*TRIED_OPTIMIZERS, *UNLIKE_OPTIMIZERS, ANY_OPTIMIZER} <= set(OPTIMIZERS)


def test_make_run_names_what_no_optimizer_is_warned_of_and_doctor_names_predict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = {hook.partition(":")[2] or "none" for hook in main_job.HOOKS}
    named = set(re.findall("|".join(map(re.escape, registry.names())), inspect.getsource(show))) - {"none"}
    assert rows == {"none", "int8"} and named == set()
    for name in rows:
        assert {said for _, each in EACH for said in complaints(name, each, caplog)} == set()
