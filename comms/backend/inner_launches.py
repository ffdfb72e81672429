"""AllReduce order of what the backend leaves to torch's NCCL, among gradwire's own communicators (launch_order.py)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import nccl_backend_of

if TYPE_CHECKING:
    from gradwire.comms.transport.launch_order import TorchIssuer


class InnerLaunches:
    """Has an inner group's NCCL issue each collective in its turn, from gradwire's first communicator on the device on.

    Attributes:
        coalescing: Collectives are collected, and issued together at the end.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        self.coalescing = self._collected = False
        self._inner = inner
        self._issuers: dict[torch.device, TorchIssuer] = {}

    def start_coalescing(self) -> None:
        """Has nothing take a turn until `end_coalescing`."""
        self.coalescing, self._collected = True, False

    def end_coalescing(self, issue_all: Callable[[], dist.Work], device: torch.device) -> dist.Work:
        """Issues what was collected, in one turn; messages take none: two ranks may order them otherwise than sums.

        Args:
            issue_all: Does it.
            device: Of the tensors.
        """
        self.coalescing = False
        return self.issue(issue_all, device) if self._collected else issue_all()

    def issue(self, collective: Callable[[], dist.Work], device: torch.device | None) -> dist.Work:
        """Issues one collective.

        Args:
            collective: Does it.
            device: Of its tensors; None where it has none.
        """
        if self.coalescing:
            self._collected = True  # until its end, which issues them
            return collective()
        if device is None or device.type != "cuda":
            return collective()
        issuer = self._issuers.get(device) or self._join(device)
        return collective() if issuer is None else issuer.issue(collective)

    def leave(self) -> None:
        """The inner group issues nothing more."""
        if self._issuers:
            from gradwire.comms.transport.launch_order import devices

            for issuer in self._issuers.values():
                devices.leave(issuer)

    def _join(self, device: torch.device) -> "TorchIssuer | None":
        """Counts the inner group's NCCL in; None while gradwire has no communicator on the device."""
        from gradwire.comms.transport.launch_order import TorchIssuer, devices

        backend = nccl_backend_of(self._inner, device) if devices.serves(device) else None
        if backend is None:
            return None
        issuer = self._issuers[device] = TorchIssuer(backend)
        devices.join(issuer, device)
        return issuer
