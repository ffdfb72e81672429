"""What FSDP2 issues on torch's own groups, in the order of launches that gradwire's communicators of a GPU have."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import nccl_backend_of
from gradwire.comms.transport.launch_order import Result, SerializesLaunches, TorchIssuer, devices


class TorchGroups:
    """The groups of torch's that the collectives of a sharded model go over, on one GPU.

    Args:
        device: A CUDA device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issuers: dict[dist.ProcessGroup, TorchIssuer | None] = {}
        devices.prepare(several=True)

    def issue(self, group: dist.ProcessGroup, collective: Callable[[], Result]) -> Result:
        """Issues a collective on one of torch's groups from the current stream, in its turn.

        Args:
            group: One of gradwire's own takes its turn by itself, so that it is issued as it is.
            collective: Returns its work, or None where the current stream waits for it.
        """
        if group not in self._issuers:
            self._issuers[group] = self._join(group)
        issuer = self._issuers[group]
        return collective() if issuer is None else issuer.issue(collective)

    def _join(self, group: dist.ProcessGroup) -> TorchIssuer | None:
        backend = None if isinstance(group, SerializesLaunches) else nccl_backend_of(group, self._device)
        if backend is None:
            return None
        issuer = TorchIssuer(backend)
        devices.join(issuer, self._device)
        return issuer

    def close(self) -> None:
        """Nothing is issued on them in turn any more."""
        for issuer in filter(None, self._issuers.values()):
            devices.leave(issuer)


class OrderedCollective:
    """One of FSDP2's own collectives, in its turn.

    Args:
        exact: Torch's own.
        groups: What it goes over.
    """

    def __init__(self, exact: Callable[..., Any], groups: TorchGroups) -> None:
        self._exact = exact
        self._groups = groups

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        """Memory for what goes in or comes out, by torch's own."""
        return self._exact.allocate(*arguments, **options)  # type: ignore[attr-defined]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        """Carries it out; returns what is to be waited for, if anything is."""
        return self._groups.issue(
            group, lambda: self._exact(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        )
