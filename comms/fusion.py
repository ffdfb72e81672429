"""Which gradients travel together: DDP's buckets are joined into transfers, and large ones cut, by a plan of cuts.

DDP fixes its buckets when the model is wrapped; what is launched, and when, is decided here and may change between
two steps. Every rank sees the same buckets in the same order, so every rank launches the same transfers. An element's
sum does not depend on where it lies (see `rank_order`), so no plan changes a bit of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from gradwire.comms.futures import FutureTensor, Open, after_all, open_future, outcome, unwrap
from gradwire.comms.pool import Pool
from gradwire.compressors.base import Layout, Slice

Launch = Callable[[Tensor, Layout | None], FutureTensor]
"""(flat tensor, which parameter lies where) -> a future of the same tensor, reduced in place."""


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Where the sequence of a step's buckets is cut into transfers.

    Attributes:
        cuts: A transfer ends after this many buckets, counted from the start of the step, ascending; buckets behind the
            last cut travel when the step ends.
        sizes: Bytes of the step's buckets that the cuts were made for; another sequence falls back to `threshold_nbytes`.
        threshold_nbytes: Without fitting cuts a transfer ends as soon as it holds so much; 0 sends every bucket alone.
        piece_nbytes: A bucket larger than this travels in several transfers; 0 leaves buckets whole.
    """

    cuts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    threshold_nbytes: int = 0
    piece_nbytes: int = 0

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 or cut > len(self.sizes) for cut in self.cuts):
            raise ValueError(
                f"`cuts` is {self.cuts}; wanted ascending numbers from 1 to {len(self.sizes)}, the number of `sizes`"
            )
        for name in ("threshold_nbytes", "piece_nbytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; wanted 0 or a positive number")

    def ends_transfer(self, sizes: Sequence[int], pending_nbytes: int) -> bool:
        """Whether a transfer ends after the last of the buckets seen so far.

        Args:
            sizes: Bytes of the step's buckets so far.
            pending_nbytes: Bytes of those that have not been launched.
        """
        if self.sizes and tuple(sizes) == self.sizes[: len(sizes)]:
            return len(sizes) in self.cuts
        return pending_nbytes >= self.threshold_nbytes

    def pieces(self, flat: Tensor) -> list[tuple[int, int]]:
        """The runs of elements that a transfer of one bucket is cut into."""
        if not self.piece_nbytes or flat.nbytes <= self.piece_nbytes:
            return [(0, flat.numel())]
        step = max(1, self.piece_nbytes // flat.element_size())
        return [(start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)]


@dataclass(slots=True)
class _Waiting:
    """A bucket that has come and not been launched."""

    flat: Tensor
    layout: Layout | None
    done: Open


class Fusion:
    """Stands between the hook and the communicator.

    Args:
        launch: Starts an all-reduce.
        plan: The plan of the first step.
    """

    def __init__(self, launch: Launch, plan: FusionPlan) -> None:
        self._launch = launch
        self._plan = plan
        self._next: FusionPlan | None = None
        self._waiting: list[_Waiting] = []
        self._sizes: list[int] = []
        self._pool = Pool()
        self.last_sizes: tuple[int, ...] = ()
        self.launches = 0

    @property
    def plan(self) -> FusionPlan:
        """The plan of the running step."""
        return self._plan

    def change(self, plan: FusionPlan) -> None:
        """Sets the plan from the next step on; every rank must do so in the same step."""
        if self._sizes:
            self._next = plan
        else:
            self._take_up(plan)

    def add(self, flat: Tensor, layout: Layout | None = None) -> FutureTensor:
        """Takes a bucket; launches a transfer where the plan ends one here.

        Args:
            flat: 1-D, contiguous; changed in place. Not to be touched until the future is done.
            layout: Which parameter lies where in it.

        Returns:
            A future of `flat`.
        """
        if self._waiting and not _alike(self._waiting[0], flat, layout):
            self._send()
        bucket = _Waiting(flat, layout, open_future(flat))
        self._waiting.append(bucket)
        self._sizes.append(flat.nbytes)
        if self._plan.ends_transfer(self._sizes, sum(each.flat.nbytes for each in self._waiting)):
            self._send()
        return bucket.done.then(unwrap)

    def end_step(self) -> None:
        """Launches what is left and takes up a new plan; all ranks, at the same point of the sequence of buckets."""
        self._send()
        self.last_sizes = tuple(self._sizes)
        self._sizes.clear()
        if self._next is not None:
            self._take_up(self._next)

    def _take_up(self, plan: FusionPlan) -> None:
        self._plan, self._next = plan, None
        self._pool.clear()

    def _send(self) -> None:
        group, self._waiting = self._waiting, []
        if len(group) == 1:
            self._send_alone(group[0])
        elif group:
            self._send_together(group)

    def _send_alone(self, bucket: _Waiting) -> None:
        runs = self._plan.pieces(bucket.flat)
        futures = [
            self._start(
                bucket.flat[start:stop],
                bucket.layout.cut(start, stop) if bucket.layout and len(runs) > 1 else bucket.layout,
            )
            for start, stop in runs
        ]
        after_all(futures, partial(_finish_alone, bucket, futures))

    def _send_together(self, group: list[_Waiting]) -> None:
        buffer = self._pool.take(sum(bucket.flat.numel() for bucket in group), group[0].flat)
        torch.cat([bucket.flat for bucket in group], out=buffer)
        layouts = tuple(bucket.layout for bucket in group if bucket.layout is not None)
        future = self._start(buffer, _joined(layouts) if len(layouts) == len(group) else None)
        future.add_done_callback(partial(self._finish_together, group, buffer))

    def _start(self, flat: Tensor, layout: Layout | None) -> FutureTensor:
        self.launches += 1
        return self._launch(flat, layout)

    def _finish_together(self, group: list[_Waiting], buffer: Tensor, future: FutureTensor) -> None:
        """Copies the sums back and completes the buckets' futures; runs where the transfer ended."""
        error = outcome(future)
        flats = [bucket.flat for bucket in group]
        if error is None:
            torch._foreach_copy_(flats, torch.split(buffer, [flat.numel() for flat in flats]))  # one launch on CUDA
        self._pool.give_back(buffer)
        for bucket in group:
            bucket.done.set_result(bucket.flat if error is None else error)


def _finish_alone(bucket: _Waiting, futures: list[FutureTensor]) -> None:
    errors = [error for future in futures if (error := outcome(future))]
    bucket.done.set_result(errors[0] if errors else bucket.flat)


def _alike(first: _Waiting, flat: Tensor, layout: Layout | None) -> bool:
    """Whether a bucket may travel with one that waits: one tensor has one dtype, and one layout or none."""
    same = first.flat.dtype == flat.dtype and first.flat.device == flat.device
    return same and (first.layout is None) == (layout is None)


@lru_cache(maxsize=1024)
def _joined(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of tensors one after another."""
    slices, offset = [], 0
    for layout in layouts:
        slices += [
            Slice(piece.name, piece.shape, piece.parameter_start, piece.start + offset, piece.numel)
            for piece in layout.slices
        ]
        offset += layout.numel
    return Layout(tuple(slices))
