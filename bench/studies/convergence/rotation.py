"""What would be gained if matrices were turned into the bases in which their gradients are uncorrelated, and scaled?

    X' = A_left X A_right^T        A = diag(w)^-1 V^T        X = B_left X' B_right^T        B = V diag(w)

V holds the eigenvectors of the running sum of G G^T (left) or G^T G (right), G being what the nodes have decoded, so
that all of them know it and it costs no byte; w is the fourth root of the eigenvalues, with mean 1. A codec's error is
about as large everywhere in X'. In X it is then as the gradient is: small in the directions in which the gradient is
small. For an optimizer that makes all directions alike (Muon: an orthogonalised momentum) that is what counts: an error
that is spread evenly is larger than the gradient itself in most of them.

This is an experiment of the study in one process, under the names "rotated4", "rotated3" and "rotated2", and no
compressor of the package. There all nodes have to decode the same bits, and the last bits of torch's eigenvectors and
matrix products depend on the number of threads and on the processor.

Source: the two-sided bases and their powers: Gupta et al., Shampoo, ICML 2018, algorithm 1; the basis of the
eigenvectors: Vyas et al., SOAP, arXiv 2409.11321, algorithm 3, there for Adam's step.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Layout, Member, Request, Slice
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.matrices import cut_between
from gradwire.compressors.registry import names, register_compressor
from gradwire.compressors.two_stage import Parts, Residuals, TwoStage, two_stage

MEMORY = 0.95
"""Of the running sums, a step."""
EVERY = 10
"""Steps between two looks for eigenvectors of the same matrix."""
FIRST_LOOKS = (1, 2, 4, 7)
"""Steps of the start at which they are looked for, too."""
DAMPING = 1e-2
"""Of the mean eigenvalue, added to all."""
POWER = 0.25
"""Of the eigenvalues, on each of two sides. Source: Shampoo, algorithm 1."""
SHORTEST, LONGEST = 8, 1024
"""Sides that are turned."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A whole parameter of a shard, seen as a matrix of shape[0] rows."""

    item: Slice
    rows: int
    columns: int

    @property
    def sides(self) -> tuple[int, ...]:
        """Which sides are turned: 0 is the left one, of as many directions as there are rows."""
        return tuple(side for side, count in enumerate((self.rows, self.columns)) if SHORTEST <= count <= LONGEST)

    def of(self, flat: Tensor) -> Tensor:
        """The matrix in a shard: a view, (rows, columns)."""
        return flat[self.item.start : self.item.stop].view(self.rows, self.columns)


def _matrix(item: Slice) -> _Matrix | None:
    if len(item.shape) < 2 or item.numel != math.prod(item.shape):
        return None
    found = _Matrix(item, item.shape[0], item.numel // item.shape[0])
    return found if found.sides else None


class _Side:
    """One side of one matrix: its running sum, and the two maps that were last made of it."""

    def __init__(self, count: int) -> None:
        self.total = torch.zeros(count, count)
        self.into = self.back = torch.eye(count)

    def look(self) -> None:
        """Makes the maps of what has been summed up so far."""
        values, vectors = torch.linalg.eigh(self.total)
        values = values.clamp_(min=0.0)
        values = values + DAMPING * values.mean()
        widths = (values / values.mean()).pow(POWER)
        self.into, self.back = (vectors / widths).t(), vectors * widths


class Rotation:
    """The bases of all matrices of a model; one for all nodes of a process, which would find the same."""

    def __init__(self) -> None:
        self._sides: dict[tuple[str, int], _Side] = {}
        self._staged: dict[tuple[str, int], Tensor] = {}

    def matrices(self, layout: Layout) -> list[_Matrix]:
        """Returns what of a shard is turned."""
        return [found for item in layout.slices if (found := _matrix(item)) is not None]

    def into(self, flat: Tensor, layout: Layout) -> None:
        """Turns and scales the matrices of a shard, (layout.numel) float32, in place."""
        for matrix in self.matrices(layout):
            found = matrix.of(flat)
            turned = found
            for side in matrix.sides:
                by = self._side(matrix, side).into
                turned = by @ turned if side == 0 else turned @ by.t()
            found.copy_(turned)

    def back(self, flat: Tensor, layout: Layout) -> None:
        """Undoes `into`, in place."""
        for matrix in self.matrices(layout):
            found = matrix.of(flat)
            turned = found
            for side in matrix.sides:
                by = self._side(matrix, side).back
                turned = by @ turned if side == 0 else turned @ by.t()
            found.copy_(turned)

    def observe(self, total: Tensor, layout: Layout) -> None:
        """Notes one more gradient, for `end_step`.

        Args:
            total: (layout.numel) float32: what all nodes have decoded, turned back.
            layout: Of it.
        """
        for matrix in self.matrices(layout):
            gradient = matrix.of(total)
            for side in matrix.sides:
                square = gradient @ gradient.t() if side == 0 else gradient.t() @ gradient
                self._staged[matrix.item.name, side] = square

    def end_step(self, step: int) -> None:
        """Adds up what was noted, when all nodes have turned it back, and looks for eigenvectors where it is time.

        Args:
            step: Steps so far.
        """
        for (name, side), square in self._staged.items():
            held = self._sides[name, side]
            held.total.mul_(MEMORY).add_(square)
            if step in FIRST_LOOKS or step % EVERY == zlib.crc32(name.encode()) % EVERY:
                held.look()
        self._staged.clear()

    def _side(self, matrix: _Matrix, side: int) -> _Side:
        key = matrix.item.name, side
        if key not in self._sides:
            self._sides[key] = _Side((matrix.rows, matrix.columns)[side])
        return self._sides[key]


class RotatedWaterfill(TwoStage):
    """waterfill4, 3 or 2 of matrices that were turned before. Residuals stay as gradients are, whatever the bases.

    Args:
        bits: Of an element.

    Attributes:
        rotation: The bases; nodes of one process may share them.
    """

    def __init__(self, bits: int) -> None:
        super().__init__(f"rotated{bits}", WaterfillCodec(bits))
        self.rotation = Rotation()

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`: no matrix is cut."""
        return cut_between(layout, parts, lambda item: _matrix(item) is not None)

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
        """See `TwoStage.exchange`; what an owner's sum leaves out goes into its residual of what it sends."""
        assert residuals.worker is not None and residuals.new_worker is not None and residuals.new_server is not None
        p = source + residuals.worker
        sent = p.clone()
        self.rotation.into(sent, layout)
        start, stop = Parts(p.numel(), group.size, group.shares).bounds(group.rank)
        left, left_of_sum = torch.empty_like(p), torch.zeros(stop - start)
        yield from two_stage(sent, target, group, codec, return_codec, Residuals(None, left, None, left_of_sum))
        self.rotation.back(target, layout)
        self.rotation.observe(target, layout)
        sent.sub_(left)
        sent[start:stop].sub_(left_of_sum)
        self.rotation.back(sent, layout)
        torch.sub(p, sent, out=residuals.new_worker)
        residuals.new_server.zero_()

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`."""
        super().end_step(finite)
        self.rotation.end_step(self.step)


def register() -> None:
    """Makes the names of this experiment known."""
    for bits in (4, 3, 2):
        if f"rotated{bits}" not in names():
            register_compressor(f"rotated{bits}", partial(RotatedWaterfill, bits))
