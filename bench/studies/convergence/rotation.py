"""What would be gained if matrices were turned into the bases in which their gradients are uncorrelated, and scaled?

    X' = A_left X A_right^T      A = diag(w)^-1 V^T      X = B_left X' B_right^T      B = V diag(w)

The columns of V are the eigenvectors of G G^T (left) or G^T G (right), averaged over some steps, G being the gradients
that all nodes have decoded: so all of them know the bases, and they cost no byte. w is the fourth root of the
eigenvalues. Most of a gradient lies in few of these directions, so that more bits fall to them, and what an even error
in X' becomes in X is smaller where the gradient is small. For an optimizer that makes all directions alike (Muon: an
orthogonalised momentum) that is what counts: an error that is spread evenly outweighs the gradient in most of them.

All nodes must turn back alike. Eigenvectors of equal or nearly equal eigenvalues depend on the last bits of a matrix,
and those of a matrix product depend on the processor, the number of threads, even on where a tensor lies. So factors
are rounded to whole numbers so small that every partial sum of their product is a whole number that float64 can hold:
then no order of summation changes a bit. What is left is computed element by element with +, -, *, / and square roots,
which IEEE 754 rounds alike everywhere.

This is an experiment of the study, under the names "rotated4", "rotated3" and "rotated2", and no compressor of the
package.

Source: the two-sided bases and their powers: Gupta et al., Shampoo, ICML 2018, algorithm 1; eigenvectors that are kept
up to date by power iteration: Vyas et al., SOAP, arXiv 2409.11321, algorithm 4, there for Adam's step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Layout, Member, Request, Slice
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.matrices import cut_between
from gradwire.compressors.registry import names, register_compressor
from gradwire.compressors.residual import ElementStore
from gradwire.compressors.two_stage import Parts, Residuals, TwoStage, two_stage

MEMORY = 0.7
"""Of the averages, from one look at a matrix' gradient to the next."""
EVERY = 20
"""Steps from one look to the next."""
FIRST_LOOKS = (0, 1, 3, 6)
"""Steps at whose end all matrices are looked at, besides."""
DAMPING = 1e-2
"""Of the mean eigenvalue, added to all."""
TILE = 512
"""Longest run of a side that is turned as one: a longer side is turned in equal parts, each in a basis of its own."""
SHORTEST = 8
"""Shortest run that is worth a basis."""
FIRST_ITERATIONS, ITERATIONS = 8, 2
"""Of power iteration, at the first look and at each other."""
ORTHOGONALISED = 2
"""Times in each: what rounding leaves of the first time goes the second time."""
LEAST_PIVOT = 1e-5
"""Of a squared length 1: what rounding leaves of a direction that others make up is less."""
PANEL = 16
"""Rows that are eliminated one by one before the others get their sum."""
LARGEST_WHOLE = 53
"""Bits of the whole numbers up to which float64 holds all. Source: IEEE 754."""
BASIS_BITS = 20
"""Of the elements of a basis."""


def rounded(x: Tensor, bits: int) -> tuple[Tensor, float]:
    """Rounds to whole numbers times one power of two.

    Args:
        x: Float; of any shape, not empty.
        bits: The largest magnitude gets so many.

    Returns:
        The whole numbers, float64 of x' shape, and the power of two. NaN everywhere if x has an inf or NaN.
    """
    peak = float(x.abs().max())
    if not math.isfinite(peak):
        return torch.full_like(x, torch.nan, dtype=torch.float64), 1.0
    exponent = math.frexp(peak)[1] - bits if peak else 0
    return (x.double() * math.ldexp(1.0, -exponent)).round_(), math.ldexp(1.0, exponent)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float64, of as many bits of both as leave it the same wherever it is computed.

    Args:
        a: (..., rows, inner), float.
        b: (..., inner, columns), float.
    """
    bits = (LARGEST_WHOLE - math.ceil(math.log2(max(2, a.shape[-1])))) // 2
    (left, unit), (right, other) = rounded(a, bits), rounded(b, bits)
    return (left @ right).mul_(unit * other)


@dataclass(frozen=True, slots=True)
class Turn:
    """A map of each of the equal parts of one side: their matrices, as whole numbers and the unit of these."""

    whole: Tensor
    """(parts, length, length), float64."""
    unit: float

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
    """Of each part."""

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
    beside = torch.eye(length, dtype=torch.float64).expand(parts, -1, -1)
    both = torch.cat([squares, beside], 2)
    pivots = []
    for first in range(0, length, PANEL):
        last = min(first + PANEL, length)
        for row in range(first, last):
            pivot = both[:, row, row].clamp(min=LEAST_PIVOT).sqrt()
            both[:, row] /= pivot.unsqueeze(1)
            pivots.append(pivot)
            if row + 1 < last:
                both[:, row + 1 : last] -= both[:, row, row + 1 : last].unsqueeze(2) * both[:, row].unsqueeze(1)
        if last < length:
            factor = both[:, first:last, last:length].transpose(1, 2)
            both[:, last:, last:length] -= product(factor, both[:, first:last, last:length])
            both[:, last:, length:] -= product(factor, both[:, first:last, length:])
    return both[:, :, length:], torch.stack(pivots, 1)


def _lengths(columns: Tensor) -> Tensor:
    """Returns the lengths of columns: (parts, 1, length) float64 of (parts, length, length)."""
    whole, unit = rounded(columns, (LARGEST_WHOLE - math.ceil(math.log2(columns.shape[1]))) // 2)
    return whole.square().sum(1, keepdim=True).sqrt_().mul_(unit)


def looked(held: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
    """Brings bases up to date, of several sides together, whose parts have one length.

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
        trace = math.fsum(square.diagonal(dim1=1, dim2=2).reshape(-1).tolist())
        if math.isfinite(trace) and trace > 0.0:
            square.mul_(len(square) * square.shape[1] / trace).diagonal(dim1=1, dim2=2).add_(DAMPING)
            starts[not bool(held[number].any())].append(number)
    for first, numbers in starts.items():
        if not numbers:
            continue
        square = torch.cat([squares[number] for number in numbers])
        length = square.shape[1]
        if first:
            vectors = torch.eye(length, dtype=torch.float64).repeat(len(square), 1, 1)
        else:
            old = torch.cat([held[number] for number in numbers])
            vectors = old / _lengths(old)
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
    values = _lengths(moved)
    order = values.argsort(dim=2, descending=True, stable=True)
    values = values.gather(2, order)
    vectors = moved.gather(2, order.expand(-1, vectors.shape[1], -1)) / values
    for _ in range(ORTHOGONALISED):
        inverse, pivots = _inverse_cholesky(product(vectors.transpose(1, 2), vectors))
        vectors = product(vectors, inverse.transpose(1, 2))
        values = values * pivots.unsqueeze(1)
    return vectors, values


def turns_of(held: Tensor) -> tuple[Turn, Turn] | None:
    """Returns A and B of bases, (parts, length, length) as `looked` returns them; None before the first look."""
    values = _lengths(held)
    if not bool((values > 0.0).any()):
        return None
    vectors = held / values
    mean = math.fsum(values.view(-1).tolist()) / values.numel()
    widths = (values / mean).sqrt_().sqrt_()
    return Turn.of((vectors / widths).transpose(1, 2)), Turn.of(vectors * widths)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A whole parameter of a shard, seen as a matrix of shape[0] rows, of which at least one side is turned."""

    item: Slice
    rows: int
    columns: int
    left: Side | None
    right: Side | None

    def of(self, flat: Tensor) -> Tensor:
        """The matrix in a shard: a view, (rows, columns)."""
        return flat[self.item.start : self.item.stop].view(self.rows, self.columns)


def matrix_of(item: Slice) -> Matrix | None:
    """Returns the slice as a matrix that is turned, or None where it is no whole one, or no side of it is."""
    if len(item.shape) < 2 or not item.numel or item.numel != math.prod(item.shape):
        return None
    rows, columns = item.shape[0], item.numel // item.shape[0]
    left, right = side_of(rows, columns), side_of(columns, rows)
    return Matrix(item, rows, columns, left, right) if left or right else None


class Bases(ElementStore):
    """The bases of one side of each matrix, at the beginning of its elements; they know nothing of a loss scale."""

    def rescale(self, factor: float | Tensor) -> None:
        """Changes nothing: eigenvalues are relative to their mean."""


@dataclass(slots=True)
class _Turned:
    """The maps of a shard's matrices, and the stored tensors that they were made of."""

    made_of: tuple[Tensor, Tensor]
    maps: list[tuple[Matrix, tuple[Turn, Turn] | None, tuple[Turn, Turn] | None]]

    def apply(self, flat: Tensor, back: bool) -> None:
        """Turns the matrices of a shard, 1-D float32, in place: into their bases, or back."""
        for matrix, left, right in self.maps:
            found = matrix.of(flat)
            turned: Tensor = found
            if left is not None:
                turned = left[back].apply(turned)
            if right is not None:
                turned = right[back].apply(turned.t().contiguous()).t()
            if turned is not found:
                found.copy_(turned)


class RotatedWaterfill(TwoStage):
    """waterfill4, 3 or 2 of matrices that were turned before.

    Bases and residual are the state; what an owner's sum leaves out goes into its residual of what it sends. Residuals
    stay as gradients are, whatever the bases. Shards are cut between matrices; a matrix that is cut nevertheless is
    sent as waterfill sends it, and so is what is none.

    Args:
        bits: Of an element, scales included.
    """

    def __init__(self, bits: int) -> None:
        super().__init__(f"rotated{bits}", WaterfillCodec(bits))
        self.fields.pop("server")
        self._sides = Bases(), Bases()
        self.fields["left"], self.fields["right"] = self._sides
        self._turned: dict[Layout, _Turned] = {}
        self._looked: set[Layout] = set()
        """Whose bases this step has brought up to date."""
        self._matrices: dict[Layout, tuple[Matrix, ...]] = {}

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`: no matrix is cut."""
        return cut_between(layout, parts, lambda item: matrix_of(item) is not None)

    def shared(self) -> Sequence[ElementStore]:
        """See `Stateful.shared`: the bases."""
        return self._sides

    def exchange(
        self,
        source: Tensor,
        target: Tensor,
        layout: Layout,
        group: Member,
        codec: Codec,
        return_codec: Codec,
        residuals: Residuals,
    ) -> Iterator[Request]:
        """See `TwoStage.exchange`: of what was turned."""
        assert residuals.worker is not None and residuals.new_worker is not None
        turned = self._turned_of(layout, source.device)
        p = source + residuals.worker
        sent = p.clone()
        turned.apply(sent, back=False)
        start, stop = Parts(p.numel(), group.size, group.shares).bounds(group.rank)
        left, left_of_sum = torch.empty_like(p), torch.zeros(stop - start)
        yield from two_stage(sent, target, group, codec, return_codec, Residuals(None, left, None, left_of_sum))
        turned.apply(target, back=True)
        self.observe(target, layout)
        sent.sub_(left)
        sent[start:stop].sub_(left_of_sum)
        turned.apply(sent, back=True)
        torch.sub(p, sent, out=residuals.new_worker)

    def observe(self, total: Tensor, layout: Layout) -> None:
        """See `TwoStage.observe`: brings the bases up to date that it is time for; of every step, not the start's."""
        if self.step not in FIRST_LOOKS and self.step % EVERY:
            return
        self._looked.add(layout)
        by_length: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for right, store in enumerate(self._sides):
            held, staged = store.update(layout, total.device)
            staged.copy_(held)
            for each in self._matrices_of(layout):
                side = each.right if right else each.left
                if side is None:
                    continue
                gradient = each.of(total)
                rows = (gradient.t() if right else gradient).reshape(side.parts, side.length, -1)
                run = slice(each.item.start, each.item.start + side.numel)
                old, new = (flat[run].view(side.parts, side.length, side.length) for flat in (held, staged))
                by_length.setdefault(side.length, []).append((old, new, product(rows, rows.transpose(1, 2))))
        for sides in by_length.values():
            news = looked([old for old, _, _ in sides], [square for _, _, square in sides])
            for (_, new, _), found in zip(sides, news, strict=True):
                new.copy_(found)

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`."""
        super().end_step(finite)
        for layout in self._looked:
            self._turned.pop(layout, None)
        self._looked.clear()

    def _residuals(self, layout: Layout, group: Member, device: torch.device) -> Residuals:
        return Residuals(*self.fields["residual"].update(layout, device))

    def _fold_server(self, layout: Layout, device: torch.device) -> None:
        """There is no server residual."""

    def _matrices_of(self, layout: Layout) -> tuple[Matrix, ...]:
        found = self._matrices.get(layout)
        if found is None:
            found = tuple(each for item in layout.slices if (each := matrix_of(item)) is not None)
            self._matrices[layout] = found
        return found

    def _turned_of(self, layout: Layout, device: torch.device) -> _Turned:
        stored = self._sides[0].read(layout, device), self._sides[1].read(layout, device)
        found = self._turned.get(layout)
        if found is None or found.made_of[0] is not stored[0] or found.made_of[1] is not stored[1]:
            maps = []
            for each in self._matrices_of(layout):
                both = []
                for side, held in zip((each.left, each.right), stored, strict=True):
                    view = held[each.item.start : each.item.start + (side.numel if side else 0)]
                    both.append(turns_of(view.view(side.parts, side.length, side.length)) if side else None)
                maps.append((each, both[0], both[1]))
            found = self._turned[layout] = _Turned(stored, maps)
        return found


def register() -> None:
    """Makes the names of this experiment known."""
    for bits in (4, 3, 2):
        if f"rotated{bits}" not in names():
            register_compressor(f"rotated{bits}", partial(RotatedWaterfill, bits))
