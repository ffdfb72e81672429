"""What compressors that parameters had before have held back, until it is added to a gradient that arrives."""

import threading
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Layout, Slice
from gradwire.compressors.residual import ElementStore, Piece


class Leftover:
    """Takes over what one compressor holds back of some parameters, and adds it to their next gradients.

    What a step has added is let go of when the step has committed. A step whose outcome a tensor decides counts from
    the end of the next one on.
    """

    def __init__(self) -> None:
        self.store = ElementStore()
        self._moving: set[str] = set()
        """Parameters that something is held of."""
        self._added: set[str] = set()
        self._undecided: set[str] = set()
        self._adding = threading.Lock()

    def take_back(
        self, compressor: Compressor, names: set[str], shapes: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        """Moves what `compressor` holds back of some parameters to here.

        Args:
            compressor: Holds nothing of them afterwards.
            names: Of the parameters.
            shapes: Theirs, as far as they are known.
            device: Of the gradients.
        """
        runs: dict[str, list[tuple[int, int]]] = {}
        for run in compressor.held():
            if run.name in names:
                numel = run.numel
                if numel is None:
                    numel = int(torch.Size(shapes.get(run.name, ())).numel())
                runs.setdefault(run.name, []).append((run.start, run.start + numel))
        for name, found in runs.items():
            shape = shapes.get(name, (max(stop for _, stop in found),))
            for start, stop in _union(found):
                layout = Layout((Slice(name, shape, start, 0, stop - start),))
                flat = torch.zeros(stop - start, dtype=torch.float32, device=device)
                compressor.flush(flat, layout)
                compressor.export(layout, device)
                self.store.adopt(layout, flat)
                self._moving.add(name)

    def add(self, shard: Tensor, layout: Layout) -> None:
        """Adds what is held of a shard's elements to it; several threads may add to different shards at once."""
        if not self._moving:
            return
        for item in layout.slices:
            if item.name in self._moving:
                alone = Layout((Slice(item.name, item.shape, item.parameter_start, 0, item.numel),))
                self.store.pour(shard[item.start : item.stop], alone)
                with self._adding:
                    self._added.add(item.name)

    def pass_over(self, names: Collection[str]) -> None:
        """Keeps what was added to the gradients of some parameters, which nobody takes (`Planned.travelled`)."""
        self.store.pass_over(names)
        self._added.difference_update(names)

    def end_step(self, finite: bool | Tensor) -> None:
        """See `Compressor.end_step`."""
        self._let_go(self._undecided)
        added, self._added, self._undecided = self._added, set(), set()
        if isinstance(finite, Tensor):
            self.store.select(finite)
            self._undecided = added
        elif finite:
            self.store.commit()
            self._let_go(added)
        else:
            self.store.drop()

    def retract_step(self) -> None:
        """See `Compressor.retract_step`."""
        self._undecided = set()

    def adopt(self, layout: Layout, row: Tensor) -> None:
        """Adds a row, as `ElementStore.export` returns it for this layout."""
        if bool(row.any()):
            self.store.adopt(layout, row)
            self._moving.update(item.name for item in layout.slices)

    def replace(self, pieces: list[Piece]) -> None:
        """Holds these pieces in place of what it holds."""
        self.store.replace(pieces)
        self._moving = {piece.name for piece in pieces}
        self._added, self._undecided = set(), set()

    def _let_go(self, added: set[str]) -> None:
        """Forgets what has been added to gradients that have arrived, when nothing else is held."""
        if added:
            self._moving -= added
            if not self._moving:
                self.store.replace([])


def _union(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that touch or overlap, as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
