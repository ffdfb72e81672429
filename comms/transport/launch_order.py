"""This module keeps the kernels of several NCCL communicators on one GPU from waiting for each other for ever.

Two communicators deadlock if one GPU runs the first one's kernel, another GPU runs the second one's, and neither GPU
has room for both. gradwire issues on all communicators from one thread, in an order that is the same on all ranks, but
each communicator has a stream of its own, and a GPU need not keep the order across streams. `Devices` therefore makes
sure that one of three conditions holds:

- NCCL keeps the order. It does with NCCL_LAUNCH_ORDER_IMPLICIT=1, from NCCL 2.26 on, and reads the variable once in a
  process, before its first collective.
- All kernels fit on the GPU: each takes a known number of thread blocks, and each block at most one multiprocessor.
- Kernels run one after the other, ordered by events; see `LaunchSerializer`.

Thread safety: there is no lock, because gradwire issues on the communicators of a GPU from one thread at a time.

Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import torch

from gradwire.comms.bootstrap.compat import nccl_has_run, nccl_version
from gradwire.comms.environment import LAUNCH_ORDER, blocking_wait, launch_order, set_launch_order

log = logging.getLogger("gradwire")

KEPT_FROM = (2, 26)
"""First version of NCCL that reads NCCL_LAUNCH_ORDER_IMPLICIT."""


class Issued(Protocol):
    """A collective that has been issued, or an event after it."""

    def wait(self) -> object:
        """Makes the current stream wait for the collective; the host does not wait."""


class Issuer(Protocol):
    """An object that issues collectives on one communicator: a transport of gradwire, or a group of torch.

    Attributes:
        ctas: Largest number of thread blocks that one of its kernels takes; None for NCCL's own limit.
        serializer: Orders its kernels after those of other communicators; None if that is not necessary.
    """

    ctas: int | None
    serializer: "LaunchSerializer | None"

    @property
    def communicator(self) -> object:
        """Identity of the communicator. Issuers of one communicator are counted once."""


@runtime_checkable
class SerializesLaunches(Protocol):
    """A process group that orders its launches itself: callers issue on it directly, without a `TorchIssuer`.

    `isinstance` asks only whether the attribute is there, whatever its value.
    """

    serializes_launches: bool


class LaunchSerializer:
    """Makes the collectives of several communicators on one device run one after the other, in the order of issue.

    The stream of a collective waits for the last collective of another communicator. The host does not wait.
    """

    def __init__(self) -> None:
        self._last: tuple[object, Sequence[Issued]] | None = None

    def wait_for_others(self, communicator: object) -> None:
        """Makes the current stream wait for the last collective, if another communicator issued it.

        Args:
            communicator: Communicator that issues next; None waits in any case.
        """
        if self._last is not None and self._last[0] is not communicator:
            for work in self._last[1]:
                work.wait()

    def took(self, communicator: object, works: Sequence[Issued]) -> None:
        """Records the collectives that were issued last.

        Args:
            communicator: Communicator that has issued them.
            works: Works of the collectives.
        """
        self._last = communicator, works


Result = TypeVar("Result", bound=Issued | None)


class TorchIssuer:
    """Issues collectives on a communicator of torch, in order with those of gradwire's transports.

    Args:
        communicator: NCCL backend of torch's group.
    """

    ctas: int | None = None

    def __init__(self, communicator: object) -> None:
        self.serializer: LaunchSerializer | None = None
        self._communicator = communicator

    @property
    def communicator(self) -> object:
        """NCCL backend of torch's group, by which its collectives are told apart from those of others."""
        return self._communicator

    def issue(self, collective: Callable[[], Result]) -> Result:
        """Issues a collective of torch; the current stream first waits for that of another communicator, if needed.

        The host does not wait.

        Args:
            collective: Function that issues it, and returns its work; None if the current stream already waits for it.

        Returns:
            The result of `collective`.
        """
        if self.serializer is None:
            return collective()
        self.serializer.wait_for_others(self._communicator)
        work = collective()
        issued: Issued = torch.cuda.current_stream().record_event() if work is None else work
        self.serializer.took(self._communicator, [issued])
        return work


def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def most_ctas(device: torch.device) -> int:
    """Returns NCCL's own limit of a kernel's thread blocks on a CUDA device: 32, from Blackwell on 64; RCCL's is 128.

    Source: NCCL's user guide, NCCL_MAX_CTAS, and MAXCHANNELS in src/include/device.h of NCCL and of RCCL.
    """
    if torch.version.hip is not None:
        return 128
    return 64 if torch.cuda.get_device_properties(device).major >= 10 else 32


class Devices:
    """Registers the communicators of this process by device, and orders their launches where that is necessary."""

    def __init__(self) -> None:
        self._issuers: dict[int, WeakSet[Issuer]] = {}
        self._serializers: dict[int, LaunchSerializer] = {}
        self._kept: bool | None = None
        self._looked = False

    def prepare(self, several: bool) -> None:
        """Asks NCCL to keep the order of launches, where that is possible; called before a communicator is made.

        It is with NCCL 2.26 or later (not RCCL) that has not run in this process, and unless the user has set
        NCCL_LAUNCH_ORDER_IMPLICIT. The first call with `several` decides for the process. The first call of all warns
        of a variable that makes the host wait for each collective.

        Args:
            several: True if collectives of more than one communicator will be in flight on one device.
        """
        if not self._looked and (waiting := blocking_wait()) is not None:
            log.warning(
                "%s is set: the host waits for each collective of NCCL, where only a stream would, so averages in "
                "several phases do not overlap with the backward pass; unset it, unless you are looking for a hang",
                waiting,
            )
        self._looked = True
        if self._kept is None and several:
            known = nccl_version() >= KEPT_FROM and torch.version.hip is None
            if known and launch_order() is None and not nccl_has_run():
                set_launch_order()
            self._kept = known and launch_order() is True

    def join(self, issuer: Issuer, device: torch.device) -> None:
        """Adds a communicator; makes all of a device run one after the other if that is necessary.

        It is if NCCL does not keep the order of launches and the kernels of all of them do not fit on the device
        together. The first time on a device, a warning is logged.

        Args:
            issuer: Object that issues on the communicator.
            device: CUDA device with an index.
        """
        issuers = self._issuers.setdefault(device.index, WeakSet())
        issuers.add(issuer)
        communicators = {id(each.communicator): each.ctas for each in issuers}
        if self._kept or len(communicators) < 2:
            return
        room = multiprocessors(device)
        if sum(most_ctas(device) if ctas is None else ctas for ctas in communicators.values()) <= room:
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
                len(communicators),
                LAUNCH_ORDER,
            )
        for each in issuers:
            each.serializer = serializer

    def serves(self, device: torch.device) -> bool:
        """Returns whether a communicator has joined on `device`, a CUDA device with an index."""
        return bool(self._issuers.get(device.index))

    def wait_for_last(self, device: torch.device) -> None:
        """Makes the current stream wait for the last collective on a device, if collectives are serialized there.

        They are if NCCL does not keep the order of launches and the kernels of all communicators do not fit on the
        device together; else this does nothing. It is called before torch issues a collective on a group of its own:
        two communicators whose kernels wait for room on the device, in different orders on two ranks, would hang.

        Args:
            device: CUDA device with an index.
        """
        serializer = self._serializers.get(device.index)
        if serializer is not None:
            serializer.wait_for_others(None)

    def leave(self, issuer: Issuer) -> None:
        """Removes a communicator that is closed from the launch order of its device."""
        issuer.serializer = None
        for index, issuers in self._issuers.items():
            issuers.discard(issuer)
            if not issuers:
                self._serializers.pop(index, None)


devices = Devices()
"""The one `Devices` of this process."""
