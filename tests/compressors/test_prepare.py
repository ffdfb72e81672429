"""Kernels that are compiled at run time are compiled when a state is made: each compressor names all that it uses."""

import pytest
import torch

from gradwire.compressors import dgc, powersgd, two_stage
from gradwire.compressors.base import traits_of
from gradwire.compressors.composite import make_composite
from gradwire.compressors.registry import Option, make

CUDA = torch.device("cuda", 1)
CASES: list[tuple[str, dict[str, Option], set[str]]] = [
    ("none", {}, set()),
    ("fp16", {}, {"cast"}),
    ("int8", {}, {"quantize"}),
    ("waterfill4", {}, {"waterfill"}),
    ("onebit", {}, {"onebit"}),
    ("onebit", {"return_bits": 8}, {"onebit", "quantize"}),
    ("dgc", {}, {"dgc"}),
    ("dgc+int8", {}, {"dgc", "quantize"}),
    ("powersgd", {}, {"powersgd"}),
    ("powersgd", {"factor_dtype": "bfloat16"}, {"powersgd", "cast"}),
    ("powersgd+int8", {}, {"powersgd", "quantize"}),
]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The families of kernels that were asked for."""
    asked: set[str] = set()

    def note(device: torch.device, families: set[str]) -> None:
        assert device == CUDA
        asked.update(families)

    for module in (dgc, powersgd, two_stage):
        monkeypatch.setattr(module, "prepare_kernels", note)
    return asked


@pytest.mark.parametrize(("name", "options", "families"), CASES)
def test_a_compressor_prepares_its_kernels(
    name: str, options: dict[str, Option], families: set[str], prepared: set[str]
) -> None:
    traits_of(make(name, options)).prepare(CUDA)
    assert prepared == families


def test_the_compressors_of_rules_are_prepared_too(prepared: set[str]) -> None:
    traits_of(make_composite("int8", {}, [{"pattern": "*embed*", "compressor": "onebit"}])).prepare(CUDA)
    assert prepared == {"quantize", "onebit"}
