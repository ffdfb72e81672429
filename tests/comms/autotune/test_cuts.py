"""Law: the dynamic program finds what trying every set of cuts finds."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.comms.autotune.cuts import optimal_cuts


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[float], list[int], float, float]:
    count = draw(st.integers(1, 9))
    gaps = draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return list(itertools.accumulate(gaps)), sizes, draw(st.floats(0, 20)), draw(st.floats(0, 0.05))


def finish_seconds(cuts: Sequence[int], arrivals: Sequence[float], sizes: Sequence[int], a: float, b: float) -> float:
    """When the last transfer is done, where one of n bytes takes a + b n seconds and each of `cuts` ends one."""
    finish, start = 0.0, 0
    for stop in cuts:
        finish = max(finish, arrivals[stop - 1]) + a + b * sum(sizes[start:stop])
        start = stop
    return finish


@settings(max_examples=200, deadline=None)
@given(sequences())
def test_no_other_cuts_are_better(case: tuple[list[float], list[int], float, float]) -> None:
    arrivals, sizes, alpha, beta = case
    best = optimal_cuts(arrivals, sizes, alpha, beta)
    inner = range(1, len(sizes))
    every = [(*cuts, len(sizes)) for count in range(len(sizes)) for cuts in itertools.combinations(inner, count)]
    fastest = min(finish_seconds(cuts, arrivals, sizes, alpha, beta) for cuts in every)
    assert finish_seconds(best, arrivals, sizes, alpha, beta) == pytest.approx(fastest)
    assert best[-1] == len(sizes)


def test_expensive_messages_travel_together_and_cheap_ones_alone() -> None:
    assert optimal_cuts([0.0, 0.1, 0.2], [10, 10, 10], 100.0, 0.1) == (3,)
    assert optimal_cuts([0.0, 10.0, 20.0], [10, 10, 10], 0.0, 0.1) == (1, 2, 3)


def test_arrivals_and_sizes_belong_together() -> None:
    with pytest.raises(ValueError, match="`arrivals` has 1"):
        optimal_cuts([0.0], [1, 2], 1.0, 1.0)
