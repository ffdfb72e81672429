"""Makes the first step after a restart use the all-reduces of the interrupted run, though DDP's buckets differ yet.

DDP guesses its buckets and rebuilds them after the first step, in the order in which the gradients arrived. In other
buckets the blocks and shards of a compressor lie elsewhere, and a step rounds otherwise than the uninterrupted run did.
So a saved state names the all-reduces of its last step, and the first step after a load gathers its gradients into
those. It launches them when all have come: one step without overlap is the price.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.comms.fusion import Fusion
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.compressors.base import Layout, Slice

log = logging.getLogger("gradwire")

COLUMNS = 4
"""Number of columns: index of the transfer, index of the parameter by sorted name, first element in the parameter,
number of elements."""


def encode_all_reduces(layouts: Sequence[Layout]) -> Tensor:
    """Encodes which elements were in which all-reduce of a step as a tensor that a state dict may hold.

    Args:
        layouts: Layout of each all-reduce of the step, in the order in which they were started.

    Returns:
        CPU tensor of int64 with the shape (slices, 4): for each slice of each layout, in order, the index of the
        all-reduce, the index of the parameter by sorted name, its first element and its number of elements.
    """
    numbers = {name: number for number, name in enumerate(_names(layouts))}
    rows = [
        (index, numbers[piece.name], piece.parameter_start, piece.numel)
        for index, layout in enumerate(layouts)
        for piece in layout.slices
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), COLUMNS)


def decode_all_reduces(encoded: Tensor, present: Sequence[Layout]) -> list[Layout] | None:
    """Returns the layouts that `encode_all_reduces` has encoded.

    Args:
        encoded: Result of `encode_all_reduces` for the same model.
        present: Layouts of the buckets of the first step after the load, which name every parameter.

    Returns:
        Layout of each all-reduce, in order; None if the first step after the load has other parameters or elements than
        the saved step had (because one was frozen, say).
    """
    names, shapes = _names(present), {piece.name: piece.shape for layout in present for piece in layout.slices}
    if encoded.numel() and int(encoded[:, 1].max()) >= len(names):
        return None
    reduced: list[list[Slice]] = []
    for index, number, start, numel in encoded.tolist():
        if index == len(reduced):
            reduced.append([])
        before = reduced[index][-1].stop if reduced[index] else 0
        reduced[index].append(Slice(names[number], shapes[names[number]], start, before, numel))
    layouts = [Layout(tuple(slices)) for slices in reduced]
    return layouts if _elements(layouts) == _elements(present) else None


class Resume:
    """Groups the buckets of the first step after a load into the all-reduces of the saved step.

    It replaces `fusion` in that step, and passes on to it the buckets without a layout, all that arrive after the saved
    all-reduces were returned, and the end of the step.

    Args:
        prescribed: All-reduces of the saved step, as `encode_all_reduces` returns them.
        fusion: Grouping of the buckets of all other steps.

    Attributes:
        prescribed: All-reduces of the saved step, as `encode_all_reduces` returns them.
    """

    def __init__(self, prescribed: Tensor, fusion: Fusion) -> None:
        self.prescribed = prescribed
        self._fusion = fusion
        self._buckets: list[Bucket] = []
        self._done = False

    def add(self, bucket: Bucket) -> list[AllReduce]:
        """Adds a bucket, and returns the all-reduces to start now.

        Args:
            bucket: Bucket whose gradients are ready.

        Returns:
            Empty until as many elements have arrived as the saved step had, then all all-reduces of that step, in
            order. For buckets that are passed on to `fusion`, its result.
        """
        if self._done or bucket.layout is None:
            return self._fusion.add(bucket)
        self._buckets.append(bucket)
        complete = sum(each.flat.numel() for each in self._buckets) >= int(self.prescribed[:, -1].sum())
        return self._all() if complete else []

    def flush(self) -> list[AllReduce]:
        """Returns all deferred all-reduces, to start now; buckets that arrive later are passed on to `fusion`."""
        return [*self._fusion.flush(), *self._all()]

    def end_step(self) -> list[AllReduce]:
        """Ends the step of `fusion`, and returns all all-reduces that have not been started."""
        return [*self._fusion.end_step(), *self._all()]

    def _all(self) -> list[AllReduce]:
        """Returns the all-reduces of the collected buckets, as the saved step had them; empty at the second call.

        If the parameters differ from those of the saved step, a warning is logged, and each bucket is an all-reduce of
        its own.
        """
        if self._done:
            return []
        self._done = True
        present = [bucket.layout for bucket in self._buckets if bucket.layout is not None]
        reduced = decode_all_reduces(self.prescribed, present)
        if reduced is None:
            log.warning(
                "the loaded state is of a step with other parameters than this one: training goes on with what it "
                "holds of these, but not bit for bit"
            )
            reduced = present
        for bucket in self._buckets:
            bucket.pending = len(reduced)
        return [self._launch(layout) for layout in reduced]

    def _launch(self, layout: Layout) -> AllReduce:
        """Makes the all-reduce of a layout, whose parts are views of the buckets that hold its elements."""
        return AllReduce([run for piece in layout.slices for run in self._runs(piece)], layout, self._buckets)

    def _runs(self, piece: Slice) -> Iterator[Tensor]:
        """Yields views of the buckets that hold the elements of a slice, in order."""
        stop = piece.parameter_start + piece.numel
        found = sorted(
            (item.parameter_start, number, item)
            for number, bucket in enumerate(self._buckets)
            for item in (bucket.layout.slices if bucket.layout else ())
            if item.name == piece.name
        )
        for start, number, item in found:
            first, last = max(start, piece.parameter_start), min(start + item.numel, stop)
            if first < last:
                yield self._buckets[number].flat[item.start + first - start : item.start + last - start]


def _names(layouts: Sequence[Layout]) -> list[str]:
    """Returns the names of all parameters in some layouts, sorted."""
    return sorted({piece.name for layout in layouts for piece in layout.slices})


def _elements(layouts: Sequence[Layout]) -> dict[str, int]:
    """Returns parameter's name -> number of its elements in some layouts."""
    found: dict[str, int] = {}
    for layout in layouts:
        for piece in layout.slices:
            found[piece.name] = found.get(piece.name, 0) + piece.numel
    return found
