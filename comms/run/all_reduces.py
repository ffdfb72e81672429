"""Buckets, the all-reduces that carry them, and `finish`, which completes the futures of buckets at the end.

An `AllReduce` carries a bucket, a piece of one, or several joined ones. It is data: executors call `pack` before
it runs and `finish` after it. The planned all-gathers, reduce-scatters and broadcasts (`plan/collectives.py`) are
carried by one, too: what is done with the tensor is in the plan, and nothing here depends on it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gradwire.comms.plan.plan import Plan
from gradwire.comms.plan.rank_plans import RankPlan
from gradwire.comms.streams import Mark
from gradwire.compressors.base import Layout, Member, Request

FutureTensor = torch.futures.Future[Tensor]
Open = torch.futures.Future[Tensor | BaseException]
"""A future of a tensor, or of an error as a value. It is raised in a `.then`: only so does its message survive
DDP's reducer."""

Coded = Callable[[Tensor, Member], Iterator[Request]]
"""Generator function that runs a compressed phase in place of a compressor; see `AllReduce.coded`."""

_PENDING = threading.RLock()
"""Guards `Bucket.pending` and `Bucket.error`: the pieces of a bucket may end in different lanes. Reentrant, because
garbage collection inside the section may finish another bucket."""

NO_PLAN = RankPlan(Plan("none", (), 1, 0, 0.0, {}, ""), (), (), 0, False)
"""The rank plan of an operation that follows no plan, such as a sparse sum."""


def unwrap(done: Open) -> Tensor:
    """Returns the tensor of a finished future, or raises the error that is its value; for `future.then(unwrap)`.

    Args:
        done: Finished future of a bucket.

    Raises:
        BaseException: The value of the future, if it is an error.
    """
    value = done.value()
    if isinstance(value, BaseException):
        try:
            raise value.with_traceback(None)
        finally:
            # The traceback keeps this frame and the future the error: a cycle through C++ that is never collected.
            del done, value
    return value


class Pool:
    """Keeps the buffers in which buckets are joined, to use them again from step to step.

    On CUDA none is kept: torch's allocator reuses memory itself, and knows which streams still read it.

    Thread safety: all methods may be called from any thread.

    Attributes:
        allocated: Buffers allocated so far.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lock = threading.Lock()  # Guards _free and allocated.
        self.allocated = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Takes a 1-D buffer of exactly `numel` elements, with undefined content, or allocates one if none is free.

        Args:
            numel: Number of elements.
            like: Tensor with the dtype and device of the buffer.
        """
        with self._lock:
            free = self._free.get((like.dtype, numel))
            if free:
                return free.pop()
            self.allocated += 1
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        """Takes back a buffer that `take` has returned, for a later `take`; CUDA buffers are dropped instead.

        Args:
            buffer: The buffer; nothing may read or write it afterwards.
        """
        if buffer.device.type != "cuda":
            with self._lock:
                self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


@dataclass(slots=True)
class Times:
    """Holds the times of a bucket by the executor's clock; None until then, and in steps that are not timed.

    Attributes:
        arrived: Time at which DDP passed the bucket to the hook; on CUDA, at which its gradients were computed.
        reduced: Time at which the last all-reduce with a part of it ended.
    """

    arrived: Mark | None = None
    reduced: Mark | None = None


@dataclass(slots=True, eq=False)
class Bucket:
    """A flat gradient tensor to be averaged, with the future that DDP waits for.

    Attributes:
        flat: 1-D and contiguous; averaged in place. Must not be used until the future is done.
        layout: Place of each parameter in `flat`; None if the bucket is never compressed.
        times: Times of arrival and of the end.
        future: Completed with `flat` or an error. On CUDA made when it is first needed.
        pending: Number of all-reduces that carry a part of it and have not ended; negative after `give_up`. Guarded by
            `_PENDING`.
        error: First error of those; None if there was none. Guarded by `_PENDING`.
        ends: On CUDA, events at the ends of all-reduces that carried a part of it.
        index: Index among the buckets of its step.
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
        """Makes a bucket that arrives now; on a CPU with an open future, on CUDA still without one.

        Args:
            flat: Gradients, 1-D and contiguous; averaged in place.
            layout: Place of each parameter in `flat`; None if the bucket is never compressed.
            arrived: Time of arrival; None if the step is not timed.
            index: Index among the buckets of its step.
        """
        return cls(flat, layout, Times(arrived), None if flat.is_cuda else torch.futures.Future(), index=index)

    def result(self) -> FutureTensor:
        """Returns the future of the averaged `flat`; on a CPU waiting for it raises the bucket's error.

        On CUDA waiting for it makes the current stream wait, not the host, and does not raise the error: the executor
        does so at its next `start`, `release` or `raise_failure`.
        """
        if not self.flat.is_cuda:
            assert self.future is not None
            return self.future.then(unwrap)
        if self.future is None:
            self.future = torch.futures.Future(devices=[self.flat.device])
        return cast(FutureTensor, self.future)

    def give_up(self) -> FutureTensor:
        """Completes the bucket's future with `flat` as it is, so that nobody waits for the average; returns the future.

        A future that is complete keeps its value or error, and one that NCCL's own collective completes is left to it.
        All-reduces in flight may still write to `flat`; their ends and errors no longer matter to the future.
        """
        with _PENDING:
            is_open, self.pending = self.pending > 0, -1
        result = self.result()
        if is_open:
            cast(Open, self.future).set_result(self.flat)
        return result


@dataclass(slots=True, eq=False)
class AllReduce:
    """One all-reduce to start: a bucket, a piece of one, or several joined buckets; or another planned collective.

    Attributes:
        parts: Tensors to reduce in place, as if concatenated: 1-D, contiguous, of one dtype and device.
        layout: Place of each parameter in their concatenation; None if it is not compressed.
        buckets: Buckets that the parts belong to; their futures are completed at the end.
        pool: Pool of the buffer in which several parts are joined; None allocates.
        counted: Whether reports count it; messages between ranks that are no gradients are not counted.
        alone: Whether nothing else is in flight on any rank until it ends. One thread then takes it through all lanes,
            if it is one chunk, and wakes no other.
        coded: Generator function that runs the compressed phase in place of the communicator's compressor, for plans
            that are not an all-reduce. It is called with the region that the phase covers, which it changes in place,
            and this rank's place among the members, and yields the collectives to issue. None: the compressor runs it.
    """

    parts: Sequence[Tensor]
    layout: Layout | None
    buckets: Sequence[Bucket]
    pool: Pool | None = None
    counted: bool = True
    alone: bool = False
    coded: Coded | None = None


def pack(all_reduce: AllReduce) -> Tensor:
    """Returns one tensor to reduce: the only part itself, or a copy of all parts end to end, in a buffer of the pool.

    Args:
        all_reduce: The all-reduce that is about to start.

    Raises:
        RuntimeError: No memory for the copy (on CUDA a torch.OutOfMemoryError); the gradients are unchanged.
    """
    parts = all_reduce.parts
    if len(parts) == 1:
        return parts[0]
    if all_reduce.pool is None:
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=all_reduce.pool.take(sum(part.numel() for part in parts), parts[0]))


def finish(all_reduce: AllReduce, flat: Tensor, error: BaseException | None, now: Mark | None) -> None:
    """Ends an all-reduce: copies the averages back, and completes the futures of buckets that are complete.

    It also gives the buffer of joined buckets back to their pool, and records the time at which a bucket was complete.

    Args:
        all_reduce: The all-reduce that has ended.
        flat: The tensor of `pack`, which holds the averages.
        error: Error of the all-reduce; None if it succeeded. A bucket's future is completed with the first error of
            the all-reduces that carried a part of it.
        now: Time of the end; None if it is not timed.
    """
    if error is None and len(all_reduce.parts) > 1:
        try:
            sources = torch.split(flat, [part.numel() for part in all_reduce.parts])
            torch._foreach_copy_(list(all_reduce.parts), list(sources))  # One kernel on CUDA.
        except BaseException as failed:  # noqa: BLE001 - whatever it is, the futures carry it
            error = failed
        # After an error another chunk may still write to the buffer, so it is not reused.
        if all_reduce.pool is not None and error is None:
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
            cast(Open, bucket.future).set_result(bucket.flat if bucket.error is None else bucket.error)


@dataclass(slots=True, eq=False)
class RunningAllReduce:
    """Holds the state of an all-reduce in flight on this rank.

    Attributes:
        all_reduce: The tensors to average, and the buckets that they belong to.
        flat: Tensor of `pack`, 1-D, reduced in place.
        rank_plan: Plan that the all-reduce follows: the chunks of `flat`, and this rank's transfers in each.
        scale: Factor on every rank's contribution, applied before the sum.
        flush: Whether it is sent uncompressed, with the compressor's residuals added.
        pending: Number of chunks that have not ended; on a CPU negative once one has failed.
        number: Number of all-reduces started before it; the same on all ranks.
        began: Time of its start; None if it is not timed.
        ends: On CUDA, events at the ends of its chunks.
        extremes: On CUDA, 0-dim tensors for the least and the largest average, which show NaN and infinity; empty
            unless averages are checked.
        after: Factor on the sum, applied at the end.
        phases: First element of a chunk -> index, in the plan, of the phase that the chunk is in. Each chunk writes its
            own entry.
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
    phases: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndedAllReduce:
    """An all-reduce that has succeeded, timed by the host's clock.

    Attributes:
        plan: Plan that it followed.
        began: Time of its start in seconds, by the host's clock.
        ended: Time at which its last chunk ended, in seconds by the same clock.
    """

    plan: Plan
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class WaitingAllReduce:
    """The oldest all-reduce in flight, and its phase, for stall warnings.

    Attributes:
        number: Number of all-reduces started before it; the same on all ranks.
        bucket: First bucket that it carries.
        phase: Phase that it is in, such as `reduce_scatter intra_node`.
        seconds: Time since its start.
    """

    number: int
    bucket: Bucket
    phase: str
    seconds: float
