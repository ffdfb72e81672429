"""CUDA tensors, inside a node and between nodes: NCCL through torch's ProcessGroupNCCL.

NCCL knows NVLink, NVSwitch, PCIe and InfiniBand better than anything on top of it could; what gradwire adds is which
ranks talk to each other, and how much.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.comms.compat import Store, make_nccl
from gradwire.comms.transport.torch_group import TorchTransport


def connect(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> TorchTransport:
    """Connects `size` ranks, each with one CUDA device, at once (not at the first collective).

    Raises:
        RuntimeError: This torch has no NCCL, or a rank did not come.
    """
    if not dist.is_nccl_available():
        raise RuntimeError("`transport` is nccl, but this torch was built without NCCL: install a CUDA build of torch, "
                           "or keep the model on the CPU")
    return TorchTransport(make_nccl(store, rank, size, timeout, device), rank, size)
