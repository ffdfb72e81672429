"""Several communicators of NCCL on one GPU: in which order their kernels start.

Two communicators can wait for each other for ever: one GPU runs the one's kernel first, another the other's, and
neither has room for both. gradwire issues on all of them from one thread, in an order that is the same on all ranks,
but each communicator has a stream of its own, and a GPU need not keep that order across streams. So one of three things
has to be so:

- NCCL keeps the order: with NCCL_LAUNCH_ORDER_IMPLICIT=1, from NCCL 2.26 on. It reads the variable once in a process,
  before its first collective.
- There is room for all kernels: each takes a known number of thread blocks, and each block at most one multiprocessor.
- They run one after the other, by events: `LaunchSerializer`.

Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import torch

from gradwire.comms.bootstrap.compat import nccl_has_run, nccl_version
from gradwire.comms.environment import LAUNCH_ORDER, launch_order, set_launch_order

log = logging.getLogger("gradwire")

KEPT_FROM = (2, 26)
"""The first NCCL that knows the variable."""


class Issued(Protocol):
    """A collective that has been issued, or an event behind it."""

    def wait(self) -> object:
        """Has the current stream wait for it."""


class Issuer(Protocol):
    """A transport on a communicator, or a group that torch itself issues on."""

    ctas: int
    serializer: "LaunchSerializer | None"

    @property
    def communicator(self) -> object:
        """What stands for the communicator: transports of one are counted once."""


@runtime_checkable
class SerializesLaunches(Protocol):
    """A group that issues by plans and in turn with others by itself: it is used as it is."""

    serializes_launches: bool


class LaunchSerializer:
    """Has the collectives of several communicators of one device run one after the other, in the order of issue.

    A collective waits on its stream for the last one of another communicator; the host waits for nothing.
    """

    def __init__(self) -> None:
        self._last: tuple[object, Sequence[Issued]] | None = None

    def wait_for_others(self, communicator: object) -> None:
        """Puts the current stream behind what another communicator has issued last."""
        if self._last is not None and self._last[0] is not communicator:
            for work in self._last[1]:
                work.wait()

    def took(self, communicator: object, works: Sequence[Issued]) -> None:
        """Notes what has been issued last."""
        self._last = communicator, works


Result = TypeVar("Result", bound=Issued | None)


class TorchIssuer:
    """A communicator of torch's own, on which collectives are issued beside those of gradwire's transports.

    Args:
        communicator: The NCCL backend of the group.
        ctas: Thread blocks that its kernels may take.
    """

    def __init__(self, communicator: object, ctas: int) -> None:
        self.ctas = ctas
        self.serializer: LaunchSerializer | None = None
        self._communicator = communicator

    @property
    def communicator(self) -> object:
        """See `Issuer`."""
        return self._communicator

    def issue(self, collective: Callable[[], Result]) -> Result:
        """Issues a collective of torch's from the current stream, in its turn where there are turns.

        Args:
            collective: Returns its work, or None where the current stream waits for it.
        """
        if self.serializer is None:
            return collective()
        self.serializer.wait_for_others(self._communicator)
        work = collective()
        behind: Issued = torch.cuda.current_stream().record_event() if work is None else work
        self.serializer.took(self._communicator, [behind])
        return work


def multiprocessors(device: torch.device) -> int:
    """The number of a CUDA device's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Devices:
    """The communicators that gradwire issues on, by device, in this process."""

    def __init__(self) -> None:
        self._issuers: dict[int, WeakSet[Issuer]] = {}
        self._serializers: dict[int, LaunchSerializer] = {}
        self._kept: bool | None = None

    def prepare(self, several: bool) -> None:
        """Has NCCL keep the order, where it will still read that (before the first communicator of a state is made).

        Args:
            several: Whether more than one is going to be in flight on one device.
        """
        if self._kept is None and several:
            known = nccl_version() >= KEPT_FROM
            if known and launch_order() is None and not nccl_has_run():
                set_launch_order()
            self._kept = known and launch_order() is True

    def join(self, issuer: Issuer, device: torch.device) -> None:
        """Counts a communicator in. From where there is no room for all of them, they take turns.

        Args:
            issuer: On the communicator.
            device: A CUDA device, with its index.
        """
        issuers = self._issuers.setdefault(device.index, WeakSet())
        issuers.add(issuer)
        ctas = {id(each.communicator): each.ctas for each in issuers}
        if self._kept or len(ctas) < 2:
            return
        room = multiprocessors(device)
        if sum(ctas.values()) <= room:
            return
        serializer = self._serializers.get(device.index)
        if serializer is None:
            serializer = self._serializers[device.index] = LaunchSerializer()
            log.warning(
                "%s has %d multiprocessors, too few for what %d communicators of NCCL may take at once: their "
                "collectives run one after the other. With %s=1 in the environment of the whole job NCCL keeps them in "
                "order itself, and they overlap",
                device,
                room,
                len(ctas),
                LAUNCH_ORDER,
            )
        for each in issuers:
            each.serializer = serializer

    def serves(self, device: torch.device) -> bool:
        """Whether communicators are counted in on a CUDA device, given with its index."""
        return bool(self._issuers.get(device.index))

    def wait_for_last(self, device: torch.device) -> None:
        """Puts the current stream behind what has been issued last, where communicators take turns.

        For what torch is about to issue by itself on a group of its own, and the current stream will wait for.

        Args:
            device: A CUDA device, with its index.
        """
        serializer = self._serializers.get(device.index)
        if serializer is not None:
            serializer.wait_for_others(None)

    def leave(self, issuer: Issuer) -> None:
        """A communicator is closed."""
        issuer.serializer = None
        for index, issuers in self._issuers.items():
            issuers.discard(issuer)
            if not issuers:
                self._serializers.pop(index, None)


devices = Devices()
"""This process's communicators, by device."""
