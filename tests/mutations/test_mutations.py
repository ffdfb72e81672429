"""The faults still fit the sources, so that `make mutations` can plant them; it says whether they are caught."""

from collections import Counter

import pytest

from mutations.mutation import ROOT, Mutation
from mutations.run import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    planted = mutation.planted(text)
    assert planted != text
    compile(planted, mutation.file, "exec")


def test_names_are_unique() -> None:
    assert max(Counter(each.name for each in MUTATIONS).values()) == 1


TESTS = sorted({test for each in MUTATIONS for test in each.tests if test.startswith("tests/")})


@pytest.mark.parametrize("test", TESTS)
def test_the_named_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not name or f"def {name.partition('[')[0]}(" in text
