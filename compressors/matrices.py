"""Decides which parameters PowerSGD compresses as matrices, and cuts buckets so that no such matrix is divided."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.compressors.base import Layout, Slice


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """A whole parameter seen as a matrix of shape[0] rows."""

    item: Slice
    rows: int
    columns: int
    rank: int
    """Columns of the factors, at most the smaller of `rows` and `columns`."""


def as_matrix(item: Slice, rank: int, min_compression_rate: float) -> MatrixSlice | None:
    """Returns the slice as a matrix; None if it is not whole, has less than two dimensions, or would shrink too little.

    Args:
        item: Slice of a parameter.
        rank: Columns of the factors; limited to the matrix's smaller side.
        min_compression_rate: Least ratio of the matrix's elements to those of its factors.

    Source: torch's PowerSGDState: compressed only if (rows + columns) * rank * min_compression_rate < rows * columns.
    """
    if len(item.shape) < 2 or item.numel != math.prod(item.shape):
        return None
    rows = item.shape[0]
    columns = item.numel // rows if rows else 0
    rank = min(rank, rows, columns)
    if (rows + columns) * rank * min_compression_rate >= rows * columns:
        return None
    return MatrixSlice(item, rows, columns, rank)


def cut_between(layout: Layout, parts: int, whole: Callable[[Slice], bool]) -> tuple[int, ...]:
    """Cuts a bucket into runs, never inside a slice that must stay whole, so that the longest run is short.

    A run may begin and end at the bounds of slices, and inside a slice that may be divided at up to 63 evenly spaced
    places. Of all cuts at these places the one with the shortest longest run is taken.

    Args:
        layout: Layout of the bucket.
        parts: Number of runs; the last ones may be empty.
        whole: Returns whether a slice must stay in one run.

    Returns:
        `parts + 1` ascending offsets from 0 to layout.numel.
    """
    edges = [0]
    for item in layout.slices:
        if not whole(item):  # may be divided: into 64 parts is fine enough
            step = max(1, -(-item.numel // 64))
            edges += range(item.start + step, item.stop, step)
        edges.append(item.stop)
    low, high = -(-layout.numel // parts), layout.numel
    while low < high:
        middle = (low + high) // 2
        if _greedy(edges, parts, middle) is None:
            low = middle + 1
        else:
            high = middle
    bounds = _greedy(edges, parts, high) or (0,)
    return (*bounds, *[layout.numel] * (parts + 1 - len(bounds)))


def _greedy(edges: list[int], parts: int, longest: int) -> tuple[int, ...] | None:
    """Cuts a bucket from its start into runs of up to `longest` elements, each as long as the allowed cuts let it be.

    Args:
        edges: Ascending offsets at which a cut is allowed: the first is 0, the last the end of the bucket.
        parts: Largest number of runs.
        longest: Largest number of elements of a run.

    Returns:
        The offsets at which runs begin and end, from 0 to `edges[-1]`: at most `parts + 1`. None if that takes more
        than `parts` runs, or if two neighbouring edges are more than `longest` elements apart, so that a run would be
        too long.
    """
    bounds = [0]
    while bounds[-1] < edges[-1]:
        last = edges[bisect.bisect_right(edges, bounds[-1] + longest) - 1]
        if last == bounds[-1] or len(bounds) > parts:
            return None
        bounds.append(last)
    return tuple(bounds) if len(bounds) <= parts + 1 else None
