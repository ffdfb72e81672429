"""This module implements `Transport` for CPU tensors with MPI, through mpi4py.

It is for clusters whose MPI uses the network better than TCP does.

MPI moves bytes, and gradwire adds. MPI's own reductions know no bfloat16 and promise equal bits on all ranks only as
advice to implementors (MPI 4.1, section 6.9.1), so sums are made here in rank order, each slice on one rank. An
all_reduce is an exchange of slices, a sum, and an all-gather: 2(n-1)/n of the tensor sent, the lower bound.

Each group has two MPI communicators: one for collectives that are issued, one for those that start inside `wait`. Both
are used in the same order on all ranks, though by different threads, so MPI must support several threads.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, count, pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.mpi_launch import load_mpi
from gradwire.comms.bootstrap.probe import PeerWait
from gradwire.comms.errors import PeerError
from gradwire.comms.transport.sum_order import SlicesToSum
from gradwire.comms.transport.torch_group import connect_within, scale_in_place
from gradwire.comms.transport.works import SLICE, Aborted, Then
from gradwire.compressors.base import Work, even_bounds

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    from mpi4py import MPI

_groups_made = count()
_TAGS = 32749
"""Number of tags, a prime. Groups that the same ranks make at the same time, in different lanes, must have different
tags, and MPI guarantees tags up to 32767 (MPI 4.1, section 9.1.2)."""

_in_flight: "dict[int, _Request]" = {}
"""Requests that MPI has not finished, by id, kept until it has: MPI may access their buffers even if the wait was given
up, and a request of a nonblocking collective can be neither cancelled nor freed (MPI 4.1, sections 3.8.4 and 6.12)."""

MOST_NBYTES = (1 << 31) - 1
"""Bytes of a buffer, at most, whose counts and offsets an MPI without large counts takes: a C int each."""
LARGE_COUNTS = (4, 0)
"""First version of MPI with large counts (MPI 4.0, section 2.5.8): MPICH 4 has them, Open MPI 5 has not."""

_POLL_SECONDS = (0.0, 0.0, 0.0, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6)
"""Pauses between two polls of a request, in seconds: short ones first, then longer, as ranks may outnumber cores."""


def load() -> ModuleType:
    """Returns the module of mpi4py, with MPI initialised for several threads.

    Raises:
        RuntimeError: mpi4py is missing, or MPI does not support several threads.
    """
    try:
        mpi = load_mpi()
    except RuntimeError as error:
        raise RuntimeError(f"`transport` is mpi, but {error}; or use gloo or auto") from error
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise RuntimeError(
            f"`transport` is mpi, but this MPI gives thread level {mpi.Query_thread()}; wanted "
            f"MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}): use gloo, or an MPI built with threads"
        )
    return mpi


def connect(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    abort_reason: Aborted | None = None,
    peer_wait: Callable[[], PeerWait] | None = None,
) -> "MpiGroup":
    """Makes the MPI communicators of a group, and returns it; only its members take part, and wait for each other.

    Args:
        store: Store with a prefix of its own for this group.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: Longest wait for the members, and time-out of every collective.
        abort_reason: Returns the reason why another rank has aborted; called about once a second during waits.
        peer_wait: Makes the liveness check while the other ranks connect; None checks the abort signal only.

    Raises:
        RuntimeError: mpi4py is missing, MPI does not support several threads, or a rank did not join.
        ValueError: A rank was not started by this mpirun.
        PeerError: A rank has exited before it had connected, or has aborted.
    """
    mpi = load()
    world = mpi.COMM_WORLD
    store.set(f"mpi/{rank}", f"{world.Get_rank()}/{world.Get_size()}")
    keys = [f"mpi/{each}" for each in range(size)]
    store.wait(keys, timeout)
    places = [tuple(map(int, place.decode().split("/"))) for place in store.multi_get(keys)]
    numbers = [number for number, _ in places]
    if len(set(numbers)) != size or {total for _, total in places} != {world.Get_size()}:
        raise ValueError(
            f"`transport` is mpi, but the ranks of this group are {numbers} in MPI.COMM_WORLD; wanted {size} "
            "different ones: start all ranks with one mpirun"
        )
    members = world.Get_group().Incl(numbers)
    if rank == 0:
        store.set("mpi/tag", str((next(_groups_made) + 61 * numbers[0]) % _TAGS))
    tag = int(store.get("mpi/tag"))

    def made() -> tuple["MPI.Comm", "MPI.Comm"]:
        first = world.Create_group(members, tag=tag)
        return first, first.Dup()

    others = PeerWait(range(size), rank, None, abort_reason) if peer_wait is None else peer_wait()
    return MpiGroup(mpi, *connect_within(timeout, others, made), rank, size, timeout, abort_reason)


class MpiGroup:
    """The collectives of `Transport` over MPI. Each call returns at once, and data moves while its work is waited for.

    Args:
        mpi: Module of mpi4py.
        first: Communicator for collectives that are issued.
        second: Communicator of the same ranks for collectives that start inside `wait`.
        rank: This rank's index.
        size: Number of ranks.
        timeout: Time-out of every collective.
        abort_reason: Function that returns the reason why another rank has aborted, or None; called about once a second
            during a wait, which it ends. None: no such check.
    """

    def __init__(
        self,
        mpi: ModuleType,
        first: "MPI.Comm",
        second: "MPI.Comm",
        rank: int,
        size: int,
        timeout: timedelta,
        abort_reason: Aborted | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.seconds = timeout.total_seconds()
        self.abort_reason = abort_reason
        self.reason: str | None = None
        self._mpi = mpi
        self._has_large_counts = mpi.Get_version() >= LARGE_COUNTS
        self._communicators = [first, second]

    @property
    def _first(self) -> "MPI.Comm":
        """Communicator for collectives that are issued; PeerError after `abort`, when none may begin."""
        if self.reason is not None:
            raise PeerError(self.reason)
        return self._communicators[0]

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Replaces `tensor` by the sum of `scale * tensor` over the ranks; `scale` is applied before this returns.

        Starts an MPI alltoallv by which each rank gets one slice of all tensors. The work's `wait` sums that slice in
        rank order, and all-gathers the sums; so all ranks must wait for their works in the same order.

        Args:
            tensor: Contiguous, on the CPU; changed in place.
            scale: Factor on every rank's contribution.
        """
        flat = tensor.view(-1)
        bounds = even_bounds(flat.numel(), self.size)
        return Then(
            self._scatter(flat, bounds, scale), lambda: self._gather(self._communicators[1], flat, bounds).wait()
        )

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """Sums `scale * tensor` in place, so that `tensor[bounds[r]:bounds[r + 1]]` holds the sum on rank r.

        Multiplies the whole of `tensor` by `scale` in place, then starts an MPI alltoallv by which each rank gets its
        slice of all tensors. The work's `wait` sums these in rank order. The other slices hold this rank's own values
        times `scale` afterwards.

        Args:
            tensor: 1-D on the CPU, contiguous; must not be touched until `wait` has returned.
            bounds: Ascending, one more than ranks: bounds of the slice of each rank, in elements.
            scale: Factor on every rank's contribution.
        """
        return self._scatter(tensor, bounds, scale)

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """Starts an MPI allgatherv of each rank's slice, in place; see `Transport.all_gather_slices`."""
        return self._gather(self._first, tensor, bounds)

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Starts an MPI alltoall of equal parts of `source`; see `Transport.all_to_all`."""
        sent, received = self._bytes(source), self._bytes(output)
        request = self._first.Ialltoall([sent, self._mpi.BYTE], [received, self._mpi.BYTE])
        return _Request(request, (sent, received), "all_to_all", self)

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Starts an MPI allgather of each rank's `source` into `output`; see `Transport.all_gather`."""
        sent, received = self._bytes(source), self._bytes(output)
        request = self._first.Iallgather([sent, self._mpi.BYTE], [received, self._mpi.BYTE])
        return _Request(request, (sent, received), "all_gather", self)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Starts an MPI broadcast of rank `root`'s tensor, in place; see `Transport.broadcast`."""
        data = self._bytes(tensor)
        return _Request(self._first.Ibcast([data, self._mpi.BYTE], root=root), (data,), "broadcast", self)

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: list[int], source_splits: list[int], largest_nbytes: int
    ) -> Work:
        """Starts an MPI alltoallv; MPI itself decides how to send messages of any size that it takes.

        Args:
            output: 1-D; takes the runs that arrive, in rank order.
            source: 1-D; the runs to send, in rank order.
            output_splits: Elements that arrive from each rank, this one included.
            source_splits: Elements for each rank, this one included.
            largest_nbytes: Not used; gloo's transports need it.
        """
        width = source.element_size()
        sent, received = self._bytes(source), self._bytes(output)
        request = self._first.Ialltoallv(
            [sent, _counted(source_splits, width), self._mpi.BYTE],
            [received, _counted(output_splits, width), self._mpi.BYTE],
        )
        return _Request(request, (sent, received), "exchange", self)

    def abort(self, reason: str) -> None:
        """Ends this rank's waits, present and later ones, with a PeerError with `reason`; no collective may begin.

        MPI itself continues with what it has begun. May be called from any thread.
        """
        self.reason = reason

    def close(self) -> None:
        """Frees the communicators; all members call it. Does nothing while MPI has not finished a collective on them.

        An MPI may not free a communicator that its requests still use: their ranks have aborted, and end soon.
        """
        if any(request.group is self for request in list(_in_flight.values())):
            return
        while self._communicators:
            self._communicators.pop().Free()

    def _bytes(self, tensor: Tensor) -> "numpy.typing.NDArray[numpy.uint8]":
        """Returns the memory of a tensor as an array of bytes, without a copy.

        Raises:
            ValueError: It is longer than `MOST_NBYTES`, and this MPI has no large counts.
        """
        if tensor.nbytes > MOST_NBYTES and not self._has_large_counts:
            raise ValueError(
                f"`tensor` has {tensor.nbytes} bytes; wanted {MOST_NBYTES} at most, which a call of an MPI before 4.0 "
                "takes: send less at once (`fusion`, DDP's bucket_cap_mb), or take MPICH 4 or newer, or gloo"
            )
        return tensor.view(-1).view(torch.uint8).numpy()

    def _scatter(self, flat: Tensor, bounds: Sequence[int], scale: float) -> Work:
        """Sends each slice to its owner, which adds the slices of all ranks in rank order: a reduce-scatter."""
        width = flat.element_size()
        own = bounds[self.rank + 1] - bounds[self.rank]
        received = flat.new_empty((self.size, own))
        rows = SlicesToSum(received)
        sent, buffer = self._bytes(flat), self._bytes(received)
        scale_in_place(flat, scale)  # after all memory is allocated, and nothing is refused any more
        sizes = [stop - start for start, stop in pairwise(bounds)]
        request = self._first.Ialltoallv(
            [sent, _counted(sizes, width), self._mpi.BYTE], [buffer, _counted([own] * self.size, width), self._mpi.BYTE]
        )
        arrived = _Request(request, (sent, buffer), "reduce_scatter", self)
        target = flat[bounds[self.rank] : bounds[self.rank + 1]]
        return Then(arrived, lambda: rows.sum(target))

    def _gather(self, communicator: "MPI.Comm", flat: Tensor, bounds: Sequence[int]) -> "_Request":
        data = self._bytes(flat)
        layout = _counted([stop - start for start, stop in pairwise(bounds)], flat.element_size())
        request = communicator.Iallgatherv(self._mpi.IN_PLACE, [data, layout, self._mpi.BYTE])
        return _Request(request, (data,), "all_gather", self)


class _Request:
    """A work for a request of MPI; keeps the buffers alive until MPI has finished with them.

    Args:
        request: Request of MPI in flight.
        buffers: Memory that MPI reads and writes.
        name: Name of the collective, for errors.
        group: Group whose time-out, abort reason and abort end the wait.

    Attributes:
        group: Group that has issued the request.
    """

    def __init__(self, request: "MPI.Request", buffers: tuple[object, ...], name: str, group: MpiGroup) -> None:
        self.group = group
        self._request = request
        self._buffers = buffers
        self._name = name
        _in_flight[id(self)] = self

    def wait(self) -> None:
        """Polls the request until it is done; MPI moves data only while it is polled.

        Raises:
            PeerError: The time-out is over, or this rank or another one has aborted.
        """
        group, polls, asked = self.group, 0, time.monotonic()
        deadline = asked + group.seconds
        while not self._request.Test():
            time.sleep(_POLL_SECONDS[min(polls, len(_POLL_SECONDS) - 1)])
            polls += 1
            if group.reason is not None:
                raise PeerError(group.reason)
            now = time.monotonic()
            if group.abort_reason is not None and now - asked > SLICE.total_seconds():
                asked = now
                if reason := group.abort_reason():
                    raise PeerError(reason)
            if now > deadline:
                raise PeerError(f"MPI {self._name} took longer than {group.seconds:g} s: a rank is gone or hangs", ())
        _in_flight.pop(id(self), None)
        self._buffers = ()


def _counted(splits: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Returns (counts, offsets) in bytes, as MPI takes them.

    Args:
        splits: Elements for each rank.
        width: Bytes of one element.
    """
    counts = [split * width for split in splits]
    return counts, [0, *accumulate(counts)][:-1]
