"""This module implements `Transport` for CUDA tensors on torch's ProcessGroupNCCL, inside a node and between nodes.

NCCL makes the best use of NVLink, NVSwitch, PCIe and InfiniBand; gradwire decides which ranks communicate, and how many
bytes. So every sum is a native collective of NCCL, in place, without buffers and copies, and without a pass of gradwire
over the bucket if NCCL can multiply while it sums.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.compat import (
    ALL_GATHER_SINGLE,
    ALL_TO_ALL_SINGLE,
    REDUCE_SCATTER_SINGLE,
    AllgatherOptions,
    BackendWork,
    Store,
    TorchGroup,
    make_nccl,
    makes_group_calls,
    premultiplied_sum,
)
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.errors import OverdueError, PeerError
from gradwire.comms.transport.launch_order import LaunchSerializer
from gradwire.comms.transport.works import CLOSE_SECONDS, Works
from gradwire.compressors.base import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective, Work

log = logging.getLogger("gradwire")

ABORT_SECONDS = 1.0
"""Shortest wait for the abort of an idle communicator, in seconds; it takes milliseconds on an idle machine."""

FINISHED_POLL_SECONDS = 0.02
"""Seconds between two polls in `close` for the other ranks."""

POLL_SECONDS = 0.002
"""Seconds between two polls for a group that connects, and in `close` for collectives in flight."""

WATCHDOG_MARGIN = timedelta(hours=1)
"""Time by which torch's watchdog is later than gradwire's time-out. The watchdog counts from the issue of a collective
and gradwire from the end of the step, and once the watchdog begins to end the process, nothing stops it. It remains as
a last resort, for a process in which Python hangs."""

INTER_NODE_CTAS = 8
"""Largest number of thread blocks (CTAs) of a collective between nodes. Each occupies an SM, and two drive a NIC of 12
to 24 GB/s (NCCL's authors, github.com/NVIDIA/nccl issues 438 and 689): four for 400 Gbit/s, eight for 800. Eight are 6
% of the 132 SMs of an H100; NCCL's own limit is 32 or 64. NCCL takes fewer if fewer are enough, and a user's
NCCL_MAX_CTAS overrides this."""

NARROW = (torch.float16, torch.bfloat16)
"""Dtypes in which NCCL rounds a factor before it multiplies."""

Call = Callable[[], BackendWork]
"""Issues one collective."""


def _never(members: tuple[int, ...]) -> bool:
    """Returns False for every set of ranks."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclGroups:
    """Properties that all NCCL groups of one communicator share.

    Attributes:
        name: Name of the communicator; groups are called `gradwire/<name>/<members>` in logs and flight recorder.
        global_ranks: Rank in the default group of each rank of the communicator; empty if both are the same.
        size: Number of ranks of the communicator.
        backend: NCCL backend of the user's process group, which serves the set of all ranks, so that NCCL is not
            connected twice; None connects a group for that set, too.
        between_nodes: Returns True if every member of a set of ranks is on a node of its own.
        sums_in_switch: Returns True if a switch can sum for a set of ranks, or for those of each node in it (NVLS).
    """

    name: str = "default"
    global_ranks: tuple[int, ...] = ()
    size: int = 0
    backend: TorchGroup | None = None
    between_nodes: Callable[[tuple[int, ...]], bool] = _never
    sums_in_switch: Callable[[tuple[int, ...]], bool] = _never


class _Summing:
    """The way in which a group sums tensors of one dtype with one factor.

    Options objects of torch are made once, because making one costs as much as a call.

    Args:
        operation: Reduction of NCCL.
        multiplies_first: True if the tensor must be multiplied by the factor before.

    Attributes:
        all_reduce: Torch's options of an all-reduce.
        reduce_scatter: Torch's options of a reduce-scatter.
    """

    def __init__(self, operation: dist.ReduceOp, multiplies_first: bool) -> None:
        self.operation = operation
        self.multiplies_first = multiplies_first
        self.all_reduce = dist.AllreduceOptions()
        self.all_reduce.reduceOp = operation
        self.reduce_scatter = dist.ReduceScatterOptions()
        self.reduce_scatter.reduceOp = operation


@lru_cache(maxsize=64)
def _summing(dtype: torch.dtype, scale: float, size: int, in_switch: bool) -> _Summing:
    """Returns the way in which `size` ranks sum `scale` times a tensor.

    Args:
        dtype: Dtype of the tensor.
        scale: Factor of the sum.
        size: Number of ranks.
        in_switch: True if a switch can sum for the ranks, which it does for the plain sum only.
    """
    if scale == 1.0:
        return _Summing(cast(dist.ReduceOp, dist.ReduceOp.SUM), False)
    # With one rank torch's reduce-scatter is a copy without the factor (2.13).
    if size == 1 or in_switch or not multiplies_exactly(dtype, scale):
        return _Summing(cast(dist.ReduceOp, dist.ReduceOp.SUM), True)
    if scale == 1.0 / size:
        return _Summing(cast(dist.ReduceOp, dist.ReduceOp.AVG), False)
    if dtype == torch.bfloat16:  # see `premultiplied_sum`
        return _Summing(cast(dist.ReduceOp, dist.ReduceOp.SUM), True)
    return _Summing(premultiplied_sum(scale), False)


class NcclCalls:
    """Makes the calls of torch for collectives of one group; each call is issued later.

    Args:
        group: NCCL backend of torch.
        rank: This rank's index in the group.
        size: Number of ranks.
        sums_in_switch: Whether NCCL may sum in the NVSwitch; see `NcclTransport`.
    """

    def __init__(self, group: TorchGroup, rank: int, size: int, *, sums_in_switch: bool) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._sums_in_switch = sums_in_switch

    def own_slice(self, whole: Tensor, numel: int, *, summing: _Summing | None = None) -> Call:
        """Returns the call of an all-gather or a reduce-scatter of equal slices of one tensor, in place.

        This rank's slice is `whole[rank * numel : (rank + 1) * numel]`. The all-gather sends it and overwrites the
        others; the reduce-scatter overwrites it with its sum over the ranks, and reads the others.

        Args:
            whole: 1-D tensor of size * numel elements: a slice for each rank, in rank order. Changed in place.
            numel: Elements of a slice.
            summing: Options of the reduction of a reduce-scatter; None for an all-gather.

        Returns:
            A function that issues the collective on torch's group and returns its work.
        """
        own = whole[self.rank * numel : (self.rank + 1) * numel]
        if summing is None:
            return lambda: getattr(self._group, ALL_GATHER_SINGLE)(whole, own, AllgatherOptions())
        options = summing.reduce_scatter
        return lambda: getattr(self._group, REDUCE_SCATTER_SINGLE)(own, whole, options)

    def all_reduce(self, tensor: Tensor, scale: float) -> Call:
        """Returns the call of an all-reduce of `scale * tensor`, in place; may multiply now, see `summing`."""
        flat = _real(tensor)[0]
        options = self.summing(flat, scale).all_reduce
        return lambda: self._group.allreduce([flat], options)

    def summing(self, tensor: Tensor, scale: float) -> _Summing:
        """Returns the options of NCCL that sum `scale * tensor`.

        If NCCL or a switch cannot multiply within the sum, `tensor` is multiplied in place now.
        """
        summing = _summing(tensor.dtype, scale, self.size, self._sums_in_switch)
        if summing.multiplies_first:
            tensor.mul_(scale)
        return summing

    def reduce(self, tensor: Tensor, root: int, operation: dist.ReduceOp) -> Call:
        """Returns the call of a reduction of `tensor` by `operation`, in place, to rank `root`."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = operation, root
        return lambda: self._group.reduce([tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> Call:
        """Returns the call of a broadcast of `tensor` from rank `root`, in place on the other ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return lambda: self._group.broadcast([tensor], options)

    def all_gather(self, output: Tensor, source: Tensor) -> Call:
        """Returns the call of an all-gather of `source`, equally large on all ranks, into `output`, in rank order."""
        target, own = _flat(output), _flat(source)
        return lambda: getattr(self._group, ALL_GATHER_SINGLE)(target, own, AllgatherOptions())

    def all_gather_unequal(self, output: Tensor, source: Tensor, bounds: Sequence[int]) -> Call:
        """Returns the call of an all-gather of different numbers of rows, carried out as sends and receives.

        Broadcasts in a ring would make every node but one forward the rows of each other node: twice the bytes.

        Args:
            output: Overwritten with the rows of all ranks, in rank order.
            source: Rows of this rank; it may have none.
            bounds: `size + 1` ascending offsets of each rank's rows in `output`.

        Raises:
            ValueError: `source` has another number of rows than `bounds` gives this rank.
        """
        own, width = _flat(source), (2 if output.is_complex() else 1) * output.shape[1:].numel()
        runs = [_flat(output[start:stop]) for start, stop in pairwise(bounds)]
        if own.numel() != width * (bounds[self.rank + 1] - bounds[self.rank]):
            raise ValueError(
                f"`source` has {own.numel()} elements, but `bounds` gives rank {self.rank} "
                f"{bounds[self.rank + 1] - bounds[self.rank]} rows of {width}"
            )
        return lambda: self._group.alltoall(runs, [own] * self.size, dist.AllToAllOptions())

    def all_to_all(self, output: Tensor, source: Tensor, bounds: Sequence[int] = ()) -> Call:
        """Returns the call of an all-to-all.

        Args:
            output: Overwritten with the rows that arrive, in rank order.
            source: Rows to send, in rank order.
            bounds: `size + 1` ascending offsets of each rank's rows in `source`, the same on all ranks: this rank
                receives from every rank as many rows as it has for itself. Empty if all get equally many.
        """
        target, own = _flat(output), _flat(source)
        received: list[int] = []
        sent: list[int] = []
        if bounds:
            width = (2 if source.is_complex() else 1) * source.shape[1:].numel()
            sent = [width * (stop - start) for start, stop in pairwise(bounds)]
            received = [sent[self.rank]] * self.size
        return lambda: getattr(self._group, ALL_TO_ALL_SINGLE)(target, own, received, sent, dist.AllToAllOptions())


class NcclTransport:
    """The collectives of `Transport` on one NCCL communicator.

    Sums, broadcasts and `all_gather_slices` work in the tensor itself; `all_to_all` and `all_gather` write to `output`.
    None allocates memory for data. A collective that needs several calls of NCCL issues them as one group call if
    `group_calls` is True. NCCL decides how narrow dtypes are summed; see docs/develop/cuda.md. Each returns at once,
    and raises a PeerError after `abort`.

    Thread safety: collectives are issued from one thread at a time. `abort` may be called from any thread.

    Args:
        group: NCCL backend of torch: one that `connect` of this module made, or the user's own.
        rank: This rank's index in the group.
        size: Number of ranks.
        owned: True if `close` ends the group. A user's own group is only aborted, after a failure.
        group_calls: True if coalescing on `group` makes one group call; else calls are issued one after the other.
        sums_in_switch: True if a switch can sum for these ranks, which it does for the plain sum only.
        ctas: Largest number of thread blocks of a collective; None for NCCL's own limit.

    Attributes:
        serializer: Orders this communicator's collectives after others of the device; None if that is not necessary.
    """

    def __init__(
        self,
        group: TorchGroup,
        rank: int,
        size: int,
        *,
        owned: bool = True,
        group_calls: bool = True,
        sums_in_switch: bool = False,
        ctas: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.ctas = ctas
        self.serializer: LaunchSerializer | None = None
        self._group = group
        self._options: Any = None if owned else group.options
        self._owned = owned
        self._group_calls = group_calls
        self._calls = NcclCalls(group, rank, size, sums_in_switch=sums_in_switch)
        # The works of the last collective keep its outputs alive until the next collective or `close`. They are kept,
        # because only they show without a wait of the host if the GPU has finished (`is_done`), and releasing them
        # there would race with the thread that issues.
        self._last: Sequence[BackendWork] = ()
        self._reason: str | None = None
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()  # Guards: self._reason, self._aborting, when `abort` sets them.

    @property
    def communicator(self) -> object:
        """Torch's process group whose NCCL communicator this uses; a launch order counts each of these once."""
        return self._group

    def connect(self, device: torch.device, timeout: timedelta) -> None:
        """Connects the ranks now and not at the first collective; returns when all of them have joined.

        On a user's own group, this is an all-reduce of one number, which connects it if it is not connected yet.

        NCCL connects in one call that returns when all ranks have joined and cannot be ended: torch's `abort` only
        reaches connected communicators. So a background thread makes the call, and is abandoned if this rank aborts or
        `timeout` is over.

        Args:
            device: This rank's device, with an index.
            timeout: Longest wait for all ranks.

        Raises:
            OverdueError: A rank did not join in time.
            PeerError: `abort` was called meanwhile.
            RuntimeError: NCCL could not connect.
        """
        failed: list[BaseException] = []
        connecting = BackgroundThread(
            "gradwire NCCL connect", lambda: self._connect(device), without=None, on_failure=failed.append
        )
        connecting.start()
        deadline = time.monotonic() + timeout.total_seconds()
        while connecting.is_alive():
            self._check()
            if time.monotonic() > deadline:
                raise OverdueError(f"{self.size} ranks have not connected within {timeout.total_seconds():g} s")
            time.sleep(POLL_SECONDS)
        self._check()
        if failed:
            raise failed[0]

    def _connect(self, device: torch.device) -> None:
        if self._owned:
            self._group.eager_connect_single_device(device)
            return
        # A user's group may be connected already, and connecting it again would make a second communicator. A
        # collective connects it only if necessary, in every version of torch.
        self._group.allreduce([torch.zeros(1, dtype=torch.float32, device=device)], dist.AllreduceOptions()).wait()

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Issues an NCCL all_reduce in place, with the factor in its sum if NCCL can, else multiplied before."""
        self._check()
        return self._issue([self._calls.all_reduce(tensor, scale)])

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """Issues a reduce-scatter of equal or unequal slices, in place.

        Equal slices are one native reduce_scatter in place, and one reduce for what the last rank has beyond that;
        unequal slices that are not empty are a reduce each. Several calls are one group call if the group supports
        that.

        Args:
            tensor: 1-D; undefined outside this rank's slice afterwards.
            bounds: `size + 1` ascending offsets of the slices.
            scale: Factor on every rank's contribution; if NCCL cannot multiply within the sum, all of `tensor` is
                multiplied first.
        """
        self._check()
        flat, bounds = _real(tensor, bounds)
        summing = self._calls.summing(flat, scale)
        calls: list[Call] = []
        numel, rest = _divided(tuple(bounds))
        if numel:
            whole = flat[: self.size * numel] if rest else flat
            calls.append(self._calls.own_slice(whole, numel, summing=summing))
        for root, start, stop in rest:
            calls.append(self._calls.reduce(flat[start:stop], root, summing.operation))
        return self._issue(calls)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """Issues the inverse of `reduce_scatter`, in place: copies every rank's slice to all ranks.

        Equal slices are one native all_gather, and one broadcast for what the last rank has beyond that; unequal slices
        that are not empty are a broadcast each. See `Transport.all_gather_slices` for the arguments.
        """
        self._check()
        flat, bounds = _real(tensor, bounds)
        calls: list[Call] = []
        numel, rest = _divided(tuple(bounds))
        if numel:
            calls.append(self._calls.own_slice(flat[: self.size * numel] if rest else flat, numel))
        for root, start, stop in rest:
            calls.append(self._calls.broadcast(flat[start:stop], root))
        return self._issue(calls)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Issues an NCCL all-to-all of equal parts of `source`; see `Transport.all_to_all`."""
        self._check()
        return self._issue([self._calls.all_to_all(output, source)])

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Issues an NCCL all_gather of each rank's `source` into `output`; see `Transport.all_gather`."""
        self._check()
        return self._issue([self._calls.all_gather(output, source)])

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Issues an NCCL broadcast of rank `root`'s tensor, in place; see `Transport.broadcast`."""
        self._check()
        return self._issue([self._calls.broadcast(_real(tensor)[0], root)])

    def issue_together(self, collectives: Sequence[Collective]) -> Work:
        """Issues collectives of a compressor as one group call.

        Args:
            collectives: Collectives to issue; the same on all ranks, in the same order.

        Raises:
            ValueError: One of them is unknown; nothing was issued.
            PeerError: The communicator has been aborted.
        """
        self._check()
        calls: list[Call] = []
        for each in collectives:
            match each.op, each.tensors:
                case str(op), (tensor,) if op == ALL_REDUCE:
                    calls.append(self._calls.all_reduce(tensor, 1.0))
                case str(op), (output, source) if op == ALL_TO_ALL:
                    calls.append(self._calls.all_to_all(output, source, each.bounds))
                case str(op), (output, source) if op == ALL_GATHER and each.bounds:
                    calls.append(self._calls.all_gather_unequal(output, source, each.bounds))
                case str(op), (output, source) if op == ALL_GATHER:
                    calls.append(self._calls.all_gather(output, source))
                case _:
                    raise ValueError(
                        f"`collectives` holds {each.op!r} of {len(each.tensors)} tensors; wanted {ALL_REDUCE} of one, "
                        f"or {ALL_TO_ALL} or {ALL_GATHER} of two"
                    )
        return self._issue(calls)

    def abort(self, reason: str) -> None:
        """Aborts the communicator, also a user's own, in the background; results in flight are undefined.

        NCCL may take long to abort a communicator, and waits for other communicators of this process on the same GPU.
        So each is aborted by a thread of its own, all at once.

        Thread safety: may be called from any thread.

        Args:
            reason: Error text of every later collective.
        """
        with self._lock:
            if self._aborting is not None:
                return
            self._reason = reason
            self._aborting = BackgroundThread(
                "gradwire NCCL abort",
                self._abort,
                without=f"a group of {self.size} ranks is left to NCCL, which waits for ranks that do not come",
                on_failure=lambda error: None,  # nothing can be called on it any more: `_reason` is set
            )
            self._aborting.start()

    def is_done(self) -> bool:
        """Returns True if all issued collectives have ended on the GPU, with or without an error.

        False once `abort` was called: torch would wait for a lock that the abort holds, with the GIL held.
        """
        return self._aborting is None and all(work.is_completed() for work in self._last)  # they run in order

    def close(self, seconds: float = CLOSE_SECONDS, finished: PollingStore | None = None) -> None:
        """Ends torch's threads and the connections within a time limit, unless the group is the user's own.

        Of a user's own group, only an abort that has begun is waited for. If an abort does not end in time, a warning
        is logged, and it is left to itself.

        Every rank waits until its collectives are done and the other ranks have published the same; then it aborts the
        communicator. Torch's `shutdown` is not used: NCCL waits there for the other ranks, and torch holds a lock
        meanwhile that `abort` needs.

        Args:
            seconds: Longest wait for collectives in flight and for the other ranks, together; after that, the abort is
                waited for as long again, at least `ABORT_SECONDS`.
            finished: Store in which the members publish that they have finished; None does not wait for them.
        """
        if self._owned and self._aborting is None:
            deadline = time.monotonic() + seconds
            while not (done := self.is_done()) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if not done:
                self.abort(f"gradwire was closed on this rank while collectives of {self.size} ranks were in flight")
            else:
                if finished is not None:
                    self._wait_until_finished(finished, deadline)
                self.abort("gradwire is closed on this rank")
        if self._aborting is not None:
            self._aborting.join(max(seconds, ABORT_SECONDS))
            if self._aborting.is_alive():
                log.warning(
                    "ncclCommAbort of a communicator of %d ranks did not return within %g s; leaking it",
                    self.size,
                    seconds,
                )
        self._last = ()

    def _wait_until_finished(self, store: PollingStore, deadline: float) -> None:
        """Waits until all members have finished with the communicator, or until `deadline`."""
        try:
            if store.add("through", 1) == self.size:
                store.set("all", "")
            while not store.check(["all"]):
                if time.monotonic() > deadline:
                    log.debug("not all of %d ranks have finished with a group: closed without them", self.size)
                    return
                time.sleep(FINISHED_POLL_SECONDS)
        except RuntimeError as error:  # the process that serves the store has exited, as the last one
            log.debug("whether %d ranks have finished cannot be read from the store: %s", self.size, error)

    def _abort(self) -> None:
        self._group.abort()

    def _check(self) -> None:
        """Raises a PeerError with the reason if the communicator was aborted."""
        if self._reason is not None:
            raise PeerError(self._reason)

    def _issue(self, calls: Sequence[Call]) -> Work:
        """Issues the calls of a collective in order, several as one group call if `group_calls`; returns one work.

        If this communicator has a `serializer`, the current stream first waits for the last collective of another
        communicator of the device, and these calls are recorded as the last ones. On a user's own group, torch's
        watchdog waits `WATCHDOG_MARGIN` longer for them than the user's time-out, which is set again afterwards.

        The works are kept until the next call, for `is_done`.

        Args:
            calls: Functions that issue one collective each; may be empty.
        """
        if self.serializer is not None:
            self.serializer.wait_for_others(self._group)
        own_timeout = None if self._owned else self._watched_later()
        try:
            if len(calls) > 1 and self._group_calls:
                works: Sequence[BackendWork] = [self._group_call(calls)]
            else:
                works = [call() for call in calls]
        finally:
            if own_timeout is not None:
                self._group._set_default_timeout(own_timeout)
        self._last = works or self._last
        if self.serializer is not None:
            self.serializer.took(self._group, self._last)
        return cast(Work, works[0]) if len(works) == 1 else Works(cast(Sequence[Work], works))

    def _watched_later(self) -> timedelta:
        """Sets the time-out of the user's group `WATCHDOG_MARGIN` later for the collectives issued next.

        Torch's watchdog would end the process at the user's time-out, before gradwire has said which rank is missing.

        Returns:
            The user's time-out, to be set again once they are issued.
        """
        own: timedelta = self._options._timeout
        self._group._set_default_timeout(own + WATCHDOG_MARGIN)
        return own

    def _group_call(self, calls: Sequence[Call]) -> BackendWork:
        """Issues calls as one group call of NCCL, and returns its work; the works of the single calls are not used.

        Raises:
            BaseException: Error of a call or of the launch. The group call is ended nevertheless: NCCL counts open
                group calls of each thread, and would not launch anything else of this thread, on any communicator.
                This rank has then issued other collectives than its peers, so the communicator is aborted.
        """
        self._group._start_coalescing()
        try:
            for call in calls:
                call()
        except BaseException as error:
            try:
                self._group._end_coalescing()
            except RuntimeError as second:
                error.add_note(f"The group call could not be ended either: {second}")
            self.abort(f"a group call of NCCL failed on this rank: {error}")
            raise
        try:
            work = self._group._end_coalescing()
        except BaseException as error:
            self.abort(f"a group call of NCCL failed on this rank: {error}")
            raise
        assert work is not None, "a group call with collectives has a work"
        return work


def connect(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    name: str = "gradwire",
    global_ranks: Sequence[int] = (),
    max_ctas: int | None = None,
    sums_in_switch: bool = False,
) -> NcclTransport:
    """Returns a transport for `size` ranks, each with one CUDA device; `NcclTransport.connect` connects it.

    Args:
        store: Store implemented in C++, with a prefix of its own. Torch's heartbeat thread polls the store below the
            prefix every second; a store in Python would need the GIL for that, and a thread that waits for the
            heartbeat thread to end may hold the GIL.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: Time-out of a collective in gradwire; torch's watchdog is `WATCHDOG_MARGIN` later.
        name: Name of the group in the flight recorder and logs.
        global_ranks: Ranks of the members in the default group.
        max_ctas: Largest number of thread blocks of a collective; None leaves it to NCCL.
        sums_in_switch: Whether NCCL may sum in the NVSwitch; see `NcclTransport`.

    Raises:
        RuntimeError: This torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(
            "`transport` is nccl, but this torch was built without NCCL: install a CUDA build of torch, "
            "or keep the model on the CPU"
        )
    made = make_nccl(
        store,
        rank,
        size,
        timeout + WATCHDOG_MARGIN,
        name=name,
        global_ranks=global_ranks or range(size),
        max_ctas=max_ctas,
    )
    return NcclTransport(made, rank, size, sums_in_switch=sums_in_switch, ctas=max_ctas)


def borrow(backend: TorchGroup, rank: int, size: int, *, sums_in_switch: bool = False) -> NcclTransport:
    """Returns a transport on a user's own NCCL backend, which `close` leaves to the user.

    Args:
        backend: NCCL backend of the user's process group.
        rank: This rank's index in it.
        size: Number of ranks.
        sums_in_switch: True if a switch can sum for these ranks.
    """
    return NcclTransport(
        backend, rank, size, owned=False, group_calls=makes_group_calls(backend), sums_in_switch=sums_in_switch
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as a short text: `0-7`, `0-56/8` for every eighth rank, `0-2,5`."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and all(after - before == step for before, after in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def equal_slices(bounds: Sequence[int]) -> int:
    """Returns the elements of each slice if all are equal (the last one may be longer); 0 if they differ."""
    size, numel = len(bounds) - 1, bounds[1]
    if bounds[-1] < size * numel or any(bounds[rank] != rank * numel for rank in range(size)):
        return 0
    return numel


@lru_cache(maxsize=64)
def multiplies_exactly(dtype: torch.dtype, scale: float) -> bool:
    """Returns True if NCCL multiplies by `scale` as precisely as torch; NCCL rounds the factor to the dtype first.

    False for dtypes other than float16, bfloat16, float32 and float64.

    1/6 in bfloat16 is 0.2 % too large, for every element of every gradient; powers of two are exact.
    """
    if dtype in NARROW:
        limits = torch.finfo(dtype)
        significand = 2 * math.frexp(scale)[0]
        return limits.smallest_normal <= scale <= limits.max and (significand / limits.eps).is_integer()
    return dtype in (torch.float32, torch.float64)


@lru_cache(maxsize=1024)
def _divided(bounds: tuple[int, ...]) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Divides the ranks' slices of a tensor into equal ones, which one NCCL call handles, and what is left.

    NCCL's all-gather and reduce-scatter take slices of one length. Slices are cut by `equal_bounds`: of one length, and
    the last one with the remainder.

    Args:
        bounds: `size + 1` ascending offsets of the ranks' slices in the tensor.

    Returns:
        Elements of each equal slice; and (rank, start, stop) of what is left, to be sent by itself: the remainder in
        the last rank's slice, if there is one. If the slices are not of that form: 0, and all slices that are not
        empty.
    """
    size, numel = len(bounds) - 1, equal_slices(bounds)
    slices = tuple((rank, start, stop) for rank, (start, stop) in enumerate(pairwise(bounds)) if stop > start)
    if not numel:
        return 0, slices
    start = size * numel
    return numel, ((size - 1, start, bounds[-1]),) if bounds[-1] > start else ()


def _real(tensor: Tensor, bounds: Sequence[int] = ()) -> tuple[Tensor, Sequence[int]]:
    """Returns a complex tensor as a 1-D view of pairs of real numbers, with doubled bounds; a real one as it is."""
    if not tensor.is_complex():
        return tensor, bounds
    return torch.view_as_real(tensor).view(-1), [2 * bound for bound in bounds]


def _flat(tensor: Tensor) -> Tensor:
    return _real(tensor.view(-1))[0]
