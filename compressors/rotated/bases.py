"""Bases in which the gradients of a matrix are uncorrelated, kept up to date from sums that all ranks have.

    X' = A_left X A_right^T      A = diag(w)^-1 V^T      X = B_left X' B_right^T      B = V diag(w)

The columns of V are the eigenvectors of G G^T (left) or G^T G (right), averaged over some steps, G being the gradients
that all ranks have decoded: so all of them know the bases, and these cost no byte. w is the fourth root of the
eigenvalues.

Eigenvectors of equal or nearly equal eigenvalues depend on the last bits of a matrix, so everything here is computed as
`whole` says.

Source: the two-sided bases and their powers: Gupta et al., Shampoo, ICML 2018, algorithm 1; eigenvectors that are kept
up to date by power iteration: Vyas et al., SOAP, arXiv 2409.11321, algorithm 4, there for Adam's step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.rotated.whole import LARGEST_WHOLE, gram, lengths, product, roots_of, rounded, total

MEMORY = 0.7
"""Weight of the averages so far, at each look at a matrix' gradient."""
DAMPING = 1e-2
"""Share of the mean eigenvalue that is added to all."""
TILE = 512
"""Longest run of a side that is turned as one: a longer side is turned in equal parts, each in a basis of its own."""
SHORTEST = 8
"""Shortest run that is worth a basis."""
FIRST_ITERATIONS, ITERATIONS = 8, 2
"""Rounds of power iteration, at the first look and at each other."""
ORTHOGONALISED = 2
"""Times in each: what rounding leaves of the first time goes the second time."""
LEAST_PIVOT = 1e-5
"""Least pivot, where squared lengths are 1: what rounding leaves of a direction that others make up is less."""
PANEL = 16
"""Rows that are eliminated one by one before the others get their sum."""
BASIS_BITS = 20
"""Bits that the elements of a basis are rounded to."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A map of each of the equal parts of one side: their matrices, as whole numbers and the unit of these."""

    whole: Tensor
    """(parts, length, length), float64."""
    unit: Tensor | float
    """The power of two that `rounded` returns."""

    @classmethod
    def of(cls, matrices: Tensor) -> "Turn":
        """Rounds the matrices of all parts, (parts, length, length)."""
        return cls(*rounded(matrices, BASIS_BITS))

    def apply(self, x: Tensor) -> Tensor:
        """Returns what becomes of the columns of x: (parts * length, columns), float; float64 of the same shape."""
        parts, length, _ = self.whole.shape
        bits = LARGEST_WHOLE - BASIS_BITS - math.ceil(math.log2(length))
        whole, unit = rounded(x, min(bits, 26))
        return (self.whole @ whole.view(parts, length, -1)).mul_(unit * self.unit).view(x.shape)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a matrix that is turned: its left one has as many directions as there are rows."""

    parts: int
    length: int
    """Length of each part."""

    @property
    def numel(self) -> int:
        """Elements of its bases."""
        return self.parts * self.length * self.length


def side_of(count: int, other: int) -> Side | None:
    """Returns how a side is turned, or None where it is not: no equal parts of it are long and short enough.

    Args:
        count: Rows of a matrix, or columns.
        other: The other of both; no part is longer, so that a basis takes no more room than the matrix.
    """
    for length in range(min(TILE, count, other), SHORTEST - 1, -1):
        if count % length == 0:
            return Side(count // length, length)
    return None


def _inverse_cholesky(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Factors symmetric matrices as L L^T, in whose computation no order of summation is left open.

    Args:
        squares: (parts, length, length), float64, with ones on the diagonal.

    Returns:
        (parts, length, length) the inverses of L, and (parts, length) the diagonals of L, float64.
    """
    parts, length, _ = squares.shape
    beside = torch.eye(length, dtype=torch.float64, device=squares.device).expand(parts, -1, -1)
    both = torch.cat([squares, beside], 2)
    pivots = []
    for first in range(0, length, PANEL):
        last = min(first + PANEL, length)
        # To the left of it nothing is looked at any more, to the right there are still zeros.
        panel = both[:, first:last, first : length + last]
        pivots.append(_eliminate(panel))
        if last < length:
            factor = panel[:, :, last - first : length - first].mT
            both[:, last:, last:length] -= gram(factor)
            both[:, last:, length : length + last] -= product(factor, panel[:, :, length - first :])
    return both[:, :, length:], torch.cat(pivots, 1)


def _eliminate(panel: Tensor) -> Tensor:
    """Eliminates rows one by one; on the host in NumPy, which takes a third of the time of torch for so little at once.

    Args:
        panel: (parts, rows, columns) float64, its pivots on the diagonal; changed in place.

    Returns:
        (parts, rows) float64: the square roots of the pivots.
    """
    on_host = panel.cpu()
    rows = on_host.numpy()
    roots = np.empty(rows.shape[:2])
    with np.errstate(all="ignore"):  # what is not finite stays so, as in torch, without a warning
        for row in range(rows.shape[1]):
            roots[:, row] = np.sqrt(np.maximum(rows[:, row, row], LEAST_PIVOT))
            rows[:, row] /= roots[:, row, None]
            rows[:, row + 1 :] -= rows[:, row, row + 1 : rows.shape[1], None] * rows[:, row, None]
    panel.copy_(on_host)
    return torch.from_numpy(roots).to(panel.device)


def looked(held: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
    """Brings bases up to date, of several sides together, whose parts have one length; the host waits for a device.

    Args:
        held: (parts, length, length) float32 of each: eigenvectors as columns, each as long as its eigenvalue; zeros at
            first.
        squares: As `held`, float64: G G^T of the parts of one more gradient.

    Returns:
        As `held`; what was held where the gradient is zero or not finite.
    """
    found = list(held)
    starts: dict[bool, list[int]] = {True: [], False: []}
    for number, square in enumerate(squares):
        trace = float(total(square.diagonal(dim1=1, dim2=2)))
        if math.isfinite(trace) and trace > 0.0:
            square.mul_(len(square) * square.shape[1] / trace).diagonal(dim1=1, dim2=2).add_(DAMPING)
            starts[not bool(held[number].any())].append(number)
    for first, numbers in starts.items():
        if not numbers:
            continue
        square = torch.cat([squares[number] for number in numbers])
        length = square.shape[1]
        if first:
            vectors = torch.eye(length, dtype=torch.float64, device=square.device).repeat(len(square), 1, 1)
        else:
            old = torch.cat([held[number] for number in numbers])
            vectors = old / lengths(old)
            square = MEMORY * product(old, vectors.transpose(1, 2)) + (1.0 - MEMORY) * square
        for _ in range(FIRST_ITERATIONS if first else ITERATIONS):
            vectors, values = _iterated(square, vectors)
        parts = torch.split((vectors * values).float(), [len(held[number]) for number in numbers])
        for number, each in zip(numbers, parts, strict=True):
            found[number] = each
    return found


def _iterated(square: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """A step of power iteration.

    Args:
        square: (parts, length, length) float64, symmetric.
        vectors: As it, orthonormal columns.

    Returns:
        New columns, orthonormal, those of large eigenvalues first, and (parts, 1, length) the eigenvalues.
    """
    moved = product(square, vectors)
    values = lengths(moved)
    order = values.argsort(dim=2, descending=True, stable=True)
    values = values.gather(2, order)
    vectors = moved.gather(2, order.expand(-1, vectors.shape[1], -1)) / values
    for _ in range(ORTHOGONALISED):
        inverse, pivots = _inverse_cholesky(gram(vectors.mT))
        vectors = product(vectors, inverse.transpose(1, 2))
        values = values * pivots.unsqueeze(1)
    return vectors, values


def turns_of(held: Tensor) -> tuple[Turn, Turn] | None:
    """Returns A and B of bases, (parts, length, length) as `looked` returns them; None before the first look.

    The host waits for a device.
    """
    values = lengths(held)
    if not bool((values > 0.0).any()):
        return None
    vectors = held / values
    mean = total(values) / values.numel()
    widths = roots_of(roots_of(values / mean))
    return Turn.of((vectors / widths).transpose(1, 2)), Turn.of(vectors * widths)
