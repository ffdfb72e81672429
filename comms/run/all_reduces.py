"""What an executor is given and gives back: buckets, the launches that carry them, and how a launch ends.

What happens at the end of a transfer (copying back, completing futures) is in the launch itself, as data.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.rank_plans import RankPlan
from gradwire.comms.streams import Mark
from gradwire.compressors.base import Layout

FutureTensor = torch.futures.Future[Tensor]
Open = torch.futures.Future[Tensor | BaseException]
"""A future of a tensor, or of the error that took its place: raised only in a `.then`, an error's message survives
DDP's reducer."""

_PENDING = threading.RLock()
"""Held while a bucket's count of launches changes: its pieces may end in different lanes, and garbage that is collected
meanwhile may end another's."""

NO_PLAN = RankPlan(Plan("none", (), 1, 0, 0.0, {}, ""), (), (), 0, False)
"""The rank plan of what follows no plan."""


def unwrap(done: Open) -> Tensor:
    """The tensor of a finished future, the bucket's own; for `done.then(unwrap)`.

    Raises:
        BaseException: The value, where it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        try:
            raise value.with_traceback(None)
        finally:
            # The traceback keeps this frame, and the future keeps the error: a circle through C++, never collected.
            del done, value
    return value


class Pool:
    """Buffers for launches: none is used twice at a time, and those of ended launches are kept for the next step.

    On CUDA nothing is kept: torch's allocator already reuses memory, and knows which streams still read it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D buffer of exactly `numel` elements, its content undefined.

        Args:
            numel: Elements.
            like: Gives dtype and device.
        """
        with self._lock:
            free = self._free.get((like.dtype, numel))
            if free:
                return free.pop()
            self.allocated += 1
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer that `take` returned, once nothing reads or writes it any more."""
        if buffer.device.type != "cuda":
            with self._lock:
                self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


@dataclass(slots=True)
class Times:
    """When a bucket arrived and when it was reduced, by the executor's clock; None before, and where nothing is timed.

    Attributes:
        arrived: When the hook was given it; on CUDA, when its gradients were there.
        reduced: When its last launch ended.
    """

    arrived: Mark | None = None
    reduced: Mark | None = None


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat tensor to be averaged, and the future that says when it is.

    Attributes:
        flat: 1-D, contiguous; changed in place. Not to be touched until the future is done.
        layout: Which parameter lies where in it; None where it is never compressed.
        times: When it arrived, and when its last launch ended.
        future: Completed with `flat`, or with an error. On CUDA made when it is needed.
        pending: Launches that still carry a part of it.
        error: What went wrong first.
        ends: On CUDA, where launches that carried a part of it stand on their streams.
        index: Its place among the buckets of its step.
    """

    flat: Tensor
    layout: Layout | None
    times: Times
    future: Open | None = None
    pending: int = 1
    error: BaseException | None = None
    ends: list[torch.cuda.Event] = field(default_factory=list)
    index: int = 0

    @classmethod
    def of(cls, flat: Tensor, layout: Layout | None = None, arrived: Mark | None = None, index: int = 0) -> "Bucket":
        """A bucket that arrives now, with an open future."""
        return cls(flat, layout, Times(arrived), None if flat.is_cuda else torch.futures.Future(), index=index)

    def result(self) -> FutureTensor:
        """The future of the averaged `flat`; on a CPU waiting for it raises what went wrong.

        On CUDA whoever starts the launch gets the error, and the future has an event on the device: no callback, which
        would take one more stream.
        """
        if not self.flat.is_cuda:
            assert self.future is not None
            return self.future.then(unwrap)
        if self.future is None:
            self.future = torch.futures.Future(devices=[self.flat.device])
        return cast(FutureTensor, self.future)


@dataclass(slots=True, eq=False)
class AllReduce:
    """One all-reduce to start: a bucket, a piece of one, or several joined ones.

    Attributes:
        parts: 1-D, contiguous, of one dtype and device: what travels, end to end; averaged in place.
        layout: Which parameter lies where in all of them together, if they may be compressed.
        buckets: Whose parts these are; their futures are completed at its end.
        pool: Where the memory that several parts travel in comes from; None takes new memory.
        counted: Whether reports count it; what the ranks tell each other about themselves is not.
        alone: Nothing else is under way from here until it has ended, on any rank: one thread takes it through all
            lanes then, where it is one chunk, and no other one is woken.
    """

    parts: Sequence[Tensor]
    layout: Layout | None
    buckets: Sequence[Bucket]
    pool: Pool | None = None
    counted: bool = True
    alone: bool = False


def pack(all_reduce: AllReduce) -> Tensor:
    """What travels in one piece: the only part itself, or a copy of all of them, end to end.

    Raises:
        torch.OutOfMemoryError: There is no memory for the copy; the gradients are as they were.
    """
    parts = all_reduce.parts
    if len(parts) == 1:
        return parts[0]
    if all_reduce.pool is None:
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=all_reduce.pool.take(sum(part.numel() for part in parts), parts[0]))


def finish(all_reduce: AllReduce, flat: Tensor, error: BaseException | None, now: Mark | None) -> None:
    """Ends a launch: copies averages back, and completes the futures of buckets that no other launch still carries.

    Args:
        all_reduce: Which.
        flat: What `pack` gave, with the averages.
        error: What went wrong, if anything did; the buckets' futures are completed with the first error.
        now: The moment, for the buckets' times.
    """
    if error is None and len(all_reduce.parts) > 1:
        try:
            sources = torch.split(flat, [part.numel() for part in all_reduce.parts])
            torch._foreach_copy_(list(all_reduce.parts), list(sources))  # one launch on CUDA
        except BaseException as failed:  # noqa: BLE001 - whatever it is, the futures carry it
            error = failed
        if all_reduce.pool is not None and error is None:  # after an error another chunk may still write to it
            all_reduce.pool.give_back(flat)
    for bucket in all_reduce.buckets:
        with _PENDING:
            bucket.pending -= 1
            bucket.error = bucket.error or error
            done = bucket.pending == 0
        if done:
            bucket.times.reduced = now
            if bucket.future is None:
                bucket.result()
            assert bucket.future is not None
            bucket.future.set_result(bucket.flat if bucket.error is None else bucket.error)


@dataclass(slots=True, eq=False)
class RunningAllReduce:
    """A launch under way.

    Attributes:
        all_reduce: What is under way.
        flat: What travels, in one piece.
        rank_plan: Its plan, and this rank's part in it.
        scale: Factor on every rank's contribution.
        flush: Travel dense, with what the compressor holds back added.
        pending: Chunks that have not ended.
        number: Launches started before it; the same on all ranks.
        began: When it was started, where that is of interest.
        ends: On CUDA, where the chunks that have ended stand on their streams.
        extremes: On CUDA, where the averages are looked at: memory for the least and the largest, 0-dim.
        after: Factor on the sum.
    """

    all_reduce: AllReduce
    flat: Tensor
    rank_plan: RankPlan
    scale: float
    flush: bool
    pending: int
    number: int = 0
    began: Mark | None = None
    ends: list[torch.cuda.Event] = field(default_factory=list)
    extremes: tuple[Tensor, ...] = ()
    after: float = 1.0


@dataclass(frozen=True, slots=True)
class EndedAllReduce:
    """A launch that has ended well, by the host's clock.

    Attributes:
        plan: What was done.
        began: When it was started, in seconds.
        ended: When its last chunk ended.
    """

    plan: Plan
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class WaitingAllReduce:
    """Where the oldest launch under way stands.

    Attributes:
        number: Launches started before it; the same on all ranks.
        bucket: The first that it carries.
        phase: `reduce_scatter intra_node`.
        seconds: Since it was started.
    """

    number: int
    bucket: Bucket
    phase: str
    seconds: float
