"""One transport for each set of ranks and each lane, connected when it is first asked for.

A transport is made inside the ordered sequence of its lane, so all its members make it at the same point; the store's
keys are named after lane and members, so no two collide.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.lanes import Lane
from gradwire.comms.transport import mpi, nccl
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.comms.transport.shm import ShmGroup
from gradwire.comms.transport.torch_group import Alarm, connect_gloo
from gradwire.compressors.base import Work


class Transport(Protocol):
    """The collectives of plans and compressors over a fixed set of ranks, issued in the same order on all of them.

    Every tensor is contiguous, on the transport's device, and of the same numel and dtype on all ranks. It must stay
    alive and unread until the returned Work has been waited for.
    """

    @property
    def rank(self) -> int:
        """This rank's index in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Sum of `scale * tensor` over the ranks, in place; the same bits on all of them.

        The scaling happens in the same pass, or once the memory that the sum needs is there.
        """

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """Sums `scale * tensor` in place, so that `tensor[bounds[r]:bounds[r + 1]]` holds the sum on rank r.

        Args:
            tensor: 1-D; what it holds outside this rank's slice is undefined afterwards.
            bounds: `size + 1` ascending offsets from 0 to `tensor.numel()`; empty slices are fine.
            scale: Factor on every rank's contribution.
        """

    def all_gather_slices(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """The inverse of `reduce_scatter`: in place, every rank's slice ends up on all ranks."""

    def all_to_all(self, output: Tensor, source: Tensor) -> Work:
        """Sends the r-th of `size` equal parts of `source` (along dim 0) to rank r; `output` has the same shape."""

    def all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Fills `output` (numel = size * source.numel()) with every rank's `source`, in rank order."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copies `tensor` of rank `root` to all ranks, in place."""


class Groups(dict[tuple[Lane, tuple[int, ...]], Transport]):
    """The transports of one rank: `groups[lane, members]`, members being global ranks, this one among them.

    On CUDA everything is issued in one order, so all lanes of a set of ranks share one communicator of NCCL.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        device: Where the tensors are.
        same_node: Whether a set of ranks shares memory.
        transport: `auto`, `gloo`, `nccl` or `mpi`, as in `Config`.
        timeout: For every collective.
        alarm: Returns why another rank has given up; None while none has.
        interface: Network interface that gloo is to use; None leaves it to gloo.
    """

    def __init__(
        self,
        store: PollingStore,
        rank: int,
        device: torch.device,
        same_node: Callable[[tuple[int, ...]], bool],
        transport: str,
        timeout: timedelta,
        alarm: Alarm,
        interface: str | None = None,
    ) -> None:
        super().__init__()
        if transport == "nccl" and device.type != "cuda":
            raise ValueError(f"`transport` is nccl but the gradients are on {device}; wanted gloo or auto")
        if transport == "gloo" and device.type == "cuda":
            raise ValueError(f"`transport` is gloo but the gradients are on {device}; wanted nccl or auto")
        if transport == "mpi" and device.type != "cpu":
            raise ValueError(f"`transport` is mpi but the gradients are on {device}; wanted nccl or auto")
        self._store = store
        self._rank = rank
        self._device = device
        self._transport = transport
        self._same_node = same_node
        self._timeout = timeout
        self._alarm = alarm
        self._interface = interface
        self._closed = False

    def __missing__(self, key: tuple[Lane, tuple[int, ...]]) -> Transport:
        if self._closed:
            raise RuntimeError("gradwire is closed: its process group has been destroyed")
        lane, members = key
        if self._device.type == "cuda" and lane != (0, 0):
            made = self[(0, 0), members]
        else:
            made = self._make(f"{lane[0]}.{lane[1]}/{'-'.join(map(str, members))}", members)
        self[key] = made
        return made

    def abort(self, reason: str) -> None:
        """Wakes the ranks of this node that wait for this one in shared memory, and gives them the reason."""
        for group in list(self.values()):
            if isinstance(group, ShmGroup):
                group.abort(reason)

    def close(self) -> None:
        """Releases shared memory and connections; none is made any more."""
        self._closed = True
        for (lane, _), group in list(self.items()):
            if isinstance(group, ShmGroup) or (isinstance(group, NcclTransport) and lane == (0, 0)):
                group.close()
        self.clear()

    def _make(self, name: str, members: tuple[int, ...]) -> Transport:
        index, size = members.index(self._rank), len(members)
        if self._device.type == "cuda":
            store = PrefixStore(f"nccl/{name}", self._store.plain)
            return nccl.connect(store, index, size, self._timeout, self._device)
        if self._same_node(members):
            return ShmGroup.create(self._store, index, size, key=f"shm/{name}", timeout=self._timeout)
        if self._transport == "mpi":
            return mpi.connect(PrefixStore(f"mpi/{name}", self._store), index, size, self._timeout)
        store = PrefixStore(f"gloo/{name}", self._store)
        return connect_gloo(store, index, size, self._timeout, self._alarm, self._interface)
