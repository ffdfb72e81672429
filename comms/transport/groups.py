"""One transport group for each set of ranks and each lane, made at first use.

A group is made inside the ordered sequence of its lane, so all its members make it at the same point; the store's keys
are named after lane and members, so no two groups can meet.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import PrefixStore
from gradwire.comms.bootstrap.store import PollingStore
from gradwire.comms.lanes import Lane
from gradwire.comms.transport import gloo, mpi, nccl
from gradwire.comms.transport.nccl import NcclTransport
from gradwire.comms.transport.shm import ShmGroup
from gradwire.comms.transport.torch_group import Alarm
from gradwire.compressors.base import Group, Work


class Transport(Group, Protocol):
    """A group whose sums scale each rank's contribution: in the same pass, or once the memory they need is theirs."""

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Work:
        """Sum of `scale * tensor` over the ranks, in place."""

    def reduce_scatter(self, tensor: Tensor, bounds: Sequence[int], scale: float = 1.0) -> Work:
        """The same, each rank its slice."""


class Groups:
    """Makes and keeps the groups of one rank.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        rank: This rank.
        device: Where the tensors are.
        same_node: Whether a set of ranks shares memory.
        transport: `auto`, `gloo`, `nccl` or `mpi`, as in `Config`.
        timeout: For every collective.
        alarm: Tells whether another rank has given up.
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
        if transport == "nccl" and device.type != "cuda":
            raise ValueError(f"`transport` is nccl but the gradients are on {device}; wanted gloo or auto")
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
        self._groups: dict[tuple[Lane, tuple[int, ...]], Transport] = {}

    def get(self, lane: Lane, members: tuple[int, ...]) -> Transport:
        """The group of `members` (global ranks, this one among them) in one lane.

        On CUDA all lanes share it: everything is issued in one order anyway, and a communicator of NCCL takes memory.
        """
        lane = lane if self._device.type == "cpu" else (0, 0)
        key = (lane, members)
        if key not in self._groups:
            self._groups[key] = self._make(f"{lane[0]}.{lane[1]}/{'-'.join(map(str, members))}", members)
        return self._groups[key]

    def is_synchronous(self, members: tuple[int, ...]) -> bool:
        """Whether collectives among these ranks are done when they return: shared memory."""
        return self._device.type == "cpu" and self._same_node(members)

    def abort(self, reason: str) -> None:
        """Wakes the ranks of this node that wait for this one in shared memory, and tells them why."""
        for group in list(self._groups.values()):
            if isinstance(group, ShmGroup):
                group.abort(reason)

    def close(self) -> None:
        """Releases shared memory and connections."""
        for group in list(self._groups.values()):
            if isinstance(group, ShmGroup | NcclTransport):
                group.close()
        self._groups.clear()

    def _make(self, name: str, members: tuple[int, ...]) -> Transport:
        index, size = members.index(self._rank), len(members)
        if self.is_synchronous(members):
            return ShmGroup.create(self._store, index, size, key=f"shm/{name}", timeout=self._timeout)
        if self._device.type == "cuda":
            return nccl.connect(
                PrefixStore(f"nccl/{name}", self._store.plain), index, size, self._timeout, self._device
            )
        if self._transport == "mpi":
            return mpi.connect(PrefixStore(f"mpi/{name}", self._store), index, size, self._timeout)
        return gloo.connect(
            PrefixStore(f"gloo/{name}", self._store), index, size, self._timeout, self._alarm, self._interface
        )
