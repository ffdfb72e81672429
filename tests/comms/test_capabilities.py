"""The page of capabilities is what the code registers, and there are no more than a user can take in."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_CAPABILITIES = 50


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capabilities", ROOT / "docs" / "capabilities.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_registers(writer: ModuleType) -> None:
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "run `python docs/capabilities.py`"


def test_there_are_fifty_capabilities_at_most(writer: ModuleType) -> None:
    assert writer.counted(writer.sections()) <= MOST_CAPABILITIES


def test_every_row_has_a_sentence(writer: ModuleType) -> None:
    for heading, rows in writer.sections().items():
        assert rows and all(len(sentence.split()) > 2 for sentence in rows.values()), heading


def test_a_sentence_ends_at_its_full_stop(writer: ModuleType) -> None:
    assert writer.first_sentence("Sums 0.5 of it. Then more.") == "Sums 0.5 of it"
    assert writer.first_sentence("One of:\n    `a` or `b`.\nMore.") == "One of: `a` or `b`"
