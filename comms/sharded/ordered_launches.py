"""Orders FSDP2's collectives on torch's NCCL groups with those of gradwire's communicators on the same GPU.

Two NCCL communicators whose kernels start in different orders on two ranks can deadlock, so each launch on a device is
serialized by `transport/launch_order.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import nccl_backend_of
from gradwire.comms.transport.launch_order import Result, SerializesLaunches, TorchIssuer, devices


class TorchGroups:
    """Orders the launches of torch's process groups of a sharded model with all others on one GPU.

    Args:
        device: CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issuers: dict[dist.ProcessGroup, TorchIssuer | None] = {}
        devices.prepare(several=True)

    def issue(self, group: dist.ProcessGroup, collective: Callable[[], Result]) -> Result:
        """Issues a collective on one of torch's groups from the current stream, ordered with the device's launches.

        Args:
            group: The process group. A group of gradwire's orders its own launches: its collectives are issued as is.
            collective: Issues it; returns its work, or None if the current stream waits for it.

        Returns:
            The result of `collective`.
        """
        if group not in self._issuers:
            self._issuers[group] = self._join(group)
        issuer = self._issuers[group]
        return collective() if issuer is None else issuer.issue(collective)

    def _join(self, group: dist.ProcessGroup) -> TorchIssuer | None:
        """Registers a group, so that its launches are ordered with all others on the device.

        Returns:
            Issues the group's collectives in that order. None if they are issued as is: the group has no NCCL of
            torch's on this device, or is a group of gradwire's, which orders its own launches.
        """
        backend = None if isinstance(group, SerializesLaunches) else nccl_backend_of(group, self._device)
        if backend is None:
            return None
        issuer = TorchIssuer(backend)
        devices.join(issuer, self._device)
        return issuer

    def close(self) -> None:
        """Takes these groups out of the launch order of the device, when the model is closed; closes no group."""
        for issuer in filter(None, self._issuers.values()):
            devices.leave(issuer)


class OrderedCollective:
    """A collective of FSDP2's own whose launches are ordered by `TorchGroups`.

    Args:
        exact: The collective object that FSDP2 made.
        groups: Orders its launches.
    """

    def __init__(self, exact: Callable[..., Any], groups: TorchGroups) -> None:
        self._exact = exact
        self._groups = groups

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        """Allocates an input or output tensor, as FSDP2's object does."""
        return self._exact.allocate(*arguments, **options)  # type: ignore[attr-defined]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        """Issues the collective in the device's order; returns its work, or None if the current stream waits for it."""
        return self._groups.issue(
            group, lambda: self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        )
