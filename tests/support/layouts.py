"""Small layouts, drawn so that shards of one step differ from those of the next."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from hypothesis import strategies as st

from gradwire.compressors.base import Layout, Slice

NUMELS = {"a": 7, "b": 1, "c": 12}
Run = tuple[str, int, int]
"""Parameter, first element, elements."""


def layout_of_whole(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> Layout:
    """Whole parameters, one after another.

    Args:
        shapes: Name -> shape.
        names: Which, in this order.
    """
    slices, start = [], 0
    for name in names:
        numel = math.prod(shapes[name])
        slices.append(Slice(name, shapes[name], 0, start, numel))
        start += numel
    return Layout(tuple(slices))


def layout_of(runs: list[Run]) -> Layout:
    """Runs of parameters, one after another."""
    slices, at = [], 0
    for name, start, numel in runs:
        slices.append(Slice(name, (NUMELS[name],), start, at, numel))
        at += numel
    return Layout(tuple(slices))


@st.composite
def partitions(draw: st.DrawFn) -> list[Layout]:
    """All parameters, torn into runs, shuffled and dealt to a few shards."""
    runs: list[Run] = []
    for name, numel in NUMELS.items():
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        runs += [(name, start, stop - start) for start, stop in pairwise(cuts)]
    runs = draw(st.permutations(runs))
    middle = draw(st.integers(0, len(runs)))
    return [layout_of(part) for part in (runs[:middle], runs[middle:]) if part]
