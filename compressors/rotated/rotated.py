"""waterfill of matrices that are turned into bases of their own before they are encoded.

Most of a gradient lies in few of the directions of its matrix, so that more bits fall to these, and what an even error
becomes when it is turned back is small where the gradient is small. For an optimizer that makes all directions alike
(Muon: an orthogonalised momentum) that is what counts: an error that is spread evenly outweighs the gradient in most
of them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Member, Request, Slice
from gradwire.compressors.codecs.base import PieceCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.matrices import cut_between
from gradwire.compressors.residual import ElementStore
from gradwire.compressors.rotated.bases import Side, Turn, looked, side_of, turns_of
from gradwire.compressors.rotated.whole import gram
from gradwire.compressors.two_stage import Parts, Residuals, TwoStage, two_stage

EVERY = 20
"""Steps from one look to the next."""
FIRST_LOOKS = (0, 1, 3, 6)
"""Steps at whose end all matrices are looked at, besides."""


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


class Rotated(TwoStage):
    """The compressors "rotated4" and "rotated2": waterfill4 and waterfill2 of matrices that were turned before.

    Bases and residual are the state; what an owner's sum leaves out goes into its residual of what it sends. Residuals
    stay as gradients are, whatever the bases. Shards are cut between matrices; a matrix that is cut nevertheless is
    sent as waterfill sends it, and so is what is none. On a device the host waits for it in the steps that bring bases
    up to date: in those after `FIRST_LOOKS`, one of `EVERY`.

    Args:
        name: "rotated4" for 4 bits an element, and so on.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    def __init__(self, name: str, *, warmup_steps: int = 0) -> None:
        super().__init__(name, WaterfillCodec(int(name.removeprefix("rotated"))), warmup_steps=warmup_steps)
        self.fields.pop("server")
        self._sides = Bases(), Bases()
        self.fields["left"], self.fields["right"] = self._sides
        self._turned: dict[Layout, _Turned] = {}
        self._looked: set[Layout] = set()
        """Whose bases this step has brought up to date."""
        self._matrices: dict[Layout, tuple[Matrix, ...]] = {}

    @property
    def has_owners(self) -> bool:
        """See `Stateful.has_owners`: of equal parts only."""
        return False

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """See `Compressor.partition`: no matrix is cut."""
        return cut_between(layout, parts, lambda item: matrix_of(item) is not None)

    def shared(self) -> Sequence[ElementStore]:
        """See `Stateful.shared`: the bases."""
        return self._sides

    def exchange(
        self, source: Tensor, target: Tensor, layout: Layout, group: Member, codec: PieceCodec, residuals: Residuals
    ) -> Iterator[Request]:
        """See `TwoStage.exchange`: of what was turned."""
        assert residuals.worker is not None and residuals.new_worker is not None
        group = replace(group, shares=())  # what a sum leaves out is in its owner's next payload
        turned = self._turned_of(layout, source.device)
        p = source + residuals.worker
        sent = p.clone()
        turned.apply(sent, back=False)
        start, stop = Parts(p.numel(), group.size, group.shares).bounds(group.rank)
        left, left_of_sum = torch.empty_like(p), torch.zeros(stop - start, dtype=torch.float32, device=p.device)
        yield from two_stage(sent, target, group, codec, codec, Residuals(None, left, None, left_of_sum))
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
                by_length.setdefault(side.length, []).append((old, new, gram(rows)))
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
