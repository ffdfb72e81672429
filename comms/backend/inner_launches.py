"""Orders the collectives that the backend leaves to torch's NCCL among those of gradwire's own communicators.

See transport/launch_order.py for the reason.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import nccl_backend_of

if TYPE_CHECKING:
    from gradwire.comms.transport.launch_order import TorchIssuer


class InnerLaunches:
    """Makes an inner group's NCCL take turns with gradwire's own communicators on the same CUDA device.

    As long as gradwire has no communicator on a device, and on CPUs, collectives are issued without taking a turn.

    Args:
        inner: Torch's group that runs the collectives.

    Attributes:
        coalescing: True between `start_coalescing` and `end_coalescing`, while collectives are collected.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        self.coalescing = self._collected = False
        self._inner = inner
        self._issuers: dict[torch.device, TorchIssuer] = {}

    def start_coalescing(self) -> None:
        """Begins to collect collectives: none takes a turn of its own until `end_coalescing`."""
        self.coalescing, self._collected = True, False

    def end_coalescing(self, issue_all: Callable[[], dist.Work], device: torch.device) -> dist.Work:
        """Issues all collected collectives in one turn.

        If only point-to-point messages were collected, no turn is taken: two ranks may order them differently among
        their sums.

        Args:
            issue_all: Issues what was collected, and returns its work.
            device: Device of the tensors.

        Returns:
            The work of `issue_all`.
        """
        self.coalescing = False
        return self.issue(issue_all, device) if self._collected else issue_all()

    def issue(self, collective: Callable[[], dist.Work], device: torch.device | None) -> dist.Work:
        """Issues one collective: in its turn on a CUDA device, at once on other devices and while coalescing.

        Args:
            collective: Issues the collective on the inner group, and returns its work.
            device: Device of its tensors; None if it has none.

        Returns:
            The work of `collective`.
        """
        if self.coalescing:
            self._collected = True  # the inner group only notes it; `end_coalescing` issues it
            return collective()
        if device is None or device.type != "cuda":
            return collective()
        issuer = self._issuers.get(device) or self._join(device)
        return collective() if issuer is None else issuer.issue(collective)

    def leave(self) -> None:
        """Takes the inner group out of the order, when it issues nothing more."""
        if self._issuers:
            from gradwire.comms.transport.launch_order import devices

            for issuer in self._issuers.values():
                devices.leave(issuer)

    def _join(self, device: torch.device) -> "TorchIssuer | None":
        """Adds the inner group's NCCL to the order on a device.

        Args:
            device: A CUDA device.

        Returns:
            What issues its collectives in turn; None while gradwire has no communicator on the device, or if the inner
            group has no NCCL there.
        """
        from gradwire.comms.transport.launch_order import TorchIssuer, devices

        backend = nccl_backend_of(self._inner, device) if devices.serves(device) else None
        if backend is None:
            return None
        issuer = self._issuers[device] = TorchIssuer(backend)
        devices.join(issuer, device)
        return issuer
