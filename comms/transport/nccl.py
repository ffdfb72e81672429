"""CUDA tensors, inside a node and between nodes: NCCL through torch's ProcessGroupNCCL.

NCCL knows NVLink, NVSwitch, PCIe and InfiniBand better than anything on top of it could; what gradwire adds is which
ranks talk to each other, and how much.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import Store, make_nccl
from gradwire.comms.transport.torch_group import TorchTransport


class NcclTransport(TorchTransport):
    """The collectives of `Transport` on one NCCL communicator."""

    def close(self) -> None:
        """Waits for what is under way and ends torch's threads for it; in the destructor, torch aborts and warns."""
        self._group.shutdown()


def connect(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> NcclTransport:
    """Connects `size` ranks, each with one CUDA device, at once (not at the first collective).

    Args:
        store: A store of C++, with a prefix of its own for this group. torch's heartbeat thread asks the one below the
            prefix every second; a store of Python would need the interpreter's lock for that, which a thread that waits
            for the heartbeat thread to end may hold.
        rank: This rank's index in the group.
        size: Number of ranks.
        timeout: For the connection and for every collective.
        device: This rank's device, with its index.

    Raises:
        RuntimeError: This torch has no NCCL, or a rank did not join.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(
            "`transport` is nccl, but this torch was built without NCCL: install a CUDA build of torch, "
            "or keep the model on the CPU"
        )
    return NcclTransport(make_nccl(store, rank, size, timeout, device), rank, size)
