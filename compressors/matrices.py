"""Which parameters of a shard PowerSGD compresses as matrices, and where shards may be cut so that none is divided."""

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
    """Never more than the smaller side."""


def as_matrix(item: Slice, rank: int, min_compression_rate: float) -> MatrixSlice | None:
    """Returns the slice as a matrix, or None where it is not whole, not 2-D, or would not shrink enough.

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
    """Cuts a bucket into `parts` runs, never inside a slice that is `whole`, the longest as short as possible.

    Args:
        layout: Of the bucket.
        parts: Number of runs; the last may be empty.
        whole: Whether a slice must stay in one run.

    Returns:
        `parts + 1` ascending offsets from 0 to layout.numel.
    """
    edges = [0]
    for item in layout.slices:
        if not whole(item):  # may be cut anywhere: 64 places are enough
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
    """Fills each run up to `longest`; None where more than `parts` runs would be needed."""
    bounds = [0]
    while bounds[-1] < edges[-1]:
        last = edges[bisect.bisect_right(edges, bounds[-1] + longest) - 1]
        if last == bounds[-1] or len(bounds) > parts:
            return None
        bounds.append(last)
    return tuple(bounds) if len(bounds) <= parts + 1 else None
