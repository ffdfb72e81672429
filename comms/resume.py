"""The first step after a restart: DDP's buckets are not those of the interrupted run yet, the transfers are.

DDP guesses its buckets and rebuilds them after the first step, in the order in which the gradients came. In other
buckets the blocks and shards of a compressor lie elsewhere, and a step rounds otherwise than the uninterrupted run did.
So a saved state names the transfers of its last step, and the first step after a load gathers its gradients into those.
It launches them when backward ends: one step without overlap is the price.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.comms.fusion import Launch
from gradwire.comms.futures import FutureTensor, Open, after_all, open_future, outcome, unwrap
from gradwire.compressors.base import Layout, Slice

log = logging.getLogger("gradwire")

COLUMNS = 4
"""Of a row: number of the transfer, of the parameter (by sorted name), first element in it, elements."""


def to_rows(transfers: Sequence[Layout]) -> Tensor:
    """Which parameters travelled in which transfer, as a tensor that a state dict may hold: int64, (slices, 4)."""
    numbers = {name: number for number, name in enumerate(_names(transfers))}
    rows = [
        (index, numbers[piece.name], piece.parameter_start, piece.numel)
        for index, layout in enumerate(transfers)
        for piece in layout.slices
    ]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), COLUMNS)


def from_rows(rows: Tensor, present: Sequence[Layout]) -> list[Layout] | None:
    """The transfers that `to_rows` wrote down.

    Args:
        rows: What it returned, for this model.
        present: The layouts of this step's buckets, which name every parameter.

    Returns:
        None where this step has other parameters or elements than the transfers had (one was frozen, say).
    """
    names, shapes = _names(present), {piece.name: piece.shape for layout in present for piece in layout.slices}
    if rows.numel() and int(rows[:, 1].max()) >= len(names):
        return None
    transfers: list[list[Slice]] = []
    for index, number, start, numel in rows.tolist():
        if index == len(transfers):
            transfers.append([])
        before = transfers[index][-1].stop if transfers[index] else 0
        transfers[index].append(Slice(names[number], shapes[names[number]], start, before, numel))
    layouts = [Layout(tuple(slices)) for slices in transfers]
    return layouts if _elements(layouts) == _elements(present) else None


@dataclass(frozen=True, slots=True)
class _Bucket:
    flat: Tensor
    layout: Layout
    done: Open


class Resume:
    """Holds the buckets of one step, and sends them in the transfers of the step that was saved.

    Args:
        launch: Starts an all-reduce.
        rows: Those transfers, as `to_rows` gives them.
    """

    def __init__(self, launch: Launch, rows: Tensor) -> None:
        self._launch = launch
        self._rows = rows
        self._buckets: list[_Bucket] = []

    def add(self, flat: Tensor, layout: Layout) -> FutureTensor:
        """Takes a bucket: 1-D, contiguous, changed in place; not to be touched until the future is done."""
        bucket = _Bucket(flat, layout, open_future(flat))
        self._buckets.append(bucket)
        return bucket.done.then(unwrap)

    def end_step(self) -> None:
        """Launches everything; all ranks, at the same point of the sequence of buckets."""
        present = [bucket.layout for bucket in self._buckets]
        transfers = from_rows(self._rows, present)
        if transfers is None:
            log.warning(
                "the loaded state is of a step with other parameters than this one: training goes on with what it "
                "holds of these, but not bit for bit"
            )
            transfers = present
        buffers = [self._gather(layout) for layout in transfers]
        futures = [self._launch(buffer, layout) for buffer, layout in zip(buffers, transfers, strict=True)]
        after_all(futures, partial(self._finish, transfers, buffers, futures))

    def _gather(self, layout: Layout) -> Tensor:
        """A buffer with the gradients of one transfer."""
        return torch.cat([run for piece in layout.slices for run in self._runs(piece)])

    def _runs(self, piece: Slice) -> Iterator[Tensor]:
        """Where the elements of `piece` lie in the buckets, in order."""
        stop = piece.parameter_start + piece.numel
        homes = sorted(
            (home.parameter_start, number, home)
            for number, bucket in enumerate(self._buckets)
            for home in bucket.layout.slices
            if home.name == piece.name
        )
        for start, number, home in homes:
            first, last = max(start, piece.parameter_start), min(start + home.numel, stop)
            if first < last:
                yield self._buckets[number].flat[home.start + first - start : home.start + last - start]

    def _finish(self, transfers: list[Layout], buffers: list[Tensor], futures: list[FutureTensor]) -> None:
        """Copies the averages back and completes the buckets' futures."""
        error = next((error for future in futures if (error := outcome(future))), None)
        if error is None:
            for layout, buffer in zip(transfers, buffers, strict=True):
                for piece in layout.slices:
                    start = piece.start
                    for run in self._runs(piece):
                        run.copy_(buffer[start : start + run.numel()])
                        start += run.numel()
        for bucket in self._buckets:
            bucket.done.set_result(bucket.flat if error is None else error)


def _names(layouts: Sequence[Layout]) -> list[str]:
    return sorted({piece.name for layout in layouts for piece in layout.slices})


def _elements(layouts: Sequence[Layout]) -> dict[str, int]:
    found: dict[str, int] = {}
    for layout in layouts:
        for piece in layout.slices:
            found[piece.name] = found.get(piece.name, 0) + piece.numel
    return found
