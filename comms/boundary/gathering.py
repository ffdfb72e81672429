"""Gathers bytes and records of different lengths from the ranks of a process group, without pickles.

torch's object collectives unpickle what other ranks send, so any process that passes for a rank could run code on all
others. Here bytes are gathered, to be read with `messages` or `torch.load(weights_only=True)`.
"""

from typing import TypeVar

import torch
import torch.distributed as dist

from gradwire.comms.bootstrap.compat import device_types_of
from gradwire.comms.boundary.messages import MessageError, MessageType

T = TypeVar("T")

MOST_NBYTES = 1 << 40
"""Most bytes that one rank may contribute."""


def gather_bytes(own: bytes, group: dist.ProcessGroup | None, receiver: int | None = None) -> list[bytes]:
    """Gathers bytes of each rank of a group; every rank calls it, and waits for the others.

    Args:
        own: Bytes of this rank, of any length.
        group: Process group of the ranks; None takes the default group.
        receiver: Rank of the group that receives them; None sends them to all ranks.

    Returns:
        The bytes of each rank, this one's included, in the order of the group's ranks; empty on ranks that do not
        receive.

    Raises:
        MessageError: A rank announced an impossible length.
        RuntimeError: torch's collective failed, because a rank has exited or is late, for example.
    """
    group = group or dist.group.WORLD
    assert group is not None
    device = _device_of(group)
    # First the lengths, then the bytes, filled up to the longest.
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(own)], dtype=torch.int64, device=device), group=group)
    nbytes = [int(each.item()) for each in counts]
    if not all(0 <= each <= MOST_NBYTES for each in nbytes):
        raise MessageError(f"the ranks give {nbytes} bytes; wanted numbers from 0 to {MOST_NBYTES}")
    longest = max(*nbytes, 1)
    padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    if receiver is None:
        received = [torch.empty_like(padded) for _ in nbytes]
        dist.all_gather(received, padded, group=group)
    else:
        received = [torch.empty_like(padded) for _ in nbytes] if group.rank() == receiver else []
        dist.gather(padded, received or None, dst=dist.get_global_rank(group, receiver), group=group)
    return [each[:count].cpu().numpy().tobytes() for each, count in zip(received, nbytes, strict=bool(received))]


MOST_RECORD_NBYTES = 64 << 20
"""Maximum size of a record of one rank: ten times the largest that a command sends, the facts of an NCCL log."""


def gather_records(own: T, group: dist.ProcessGroup | None = None, *, most_nbytes: int = MOST_RECORD_NBYTES) -> list[T]:
    """Gathers one dataclass instance from each rank of a group, as JSON; every rank calls it, and waits for the others.

    Args:
        own: Record of this rank; its class declares the message, with field types that `MessageType` supports.
        group: Process group of the ranks; None takes the default group.
        most_nbytes: Most bytes of one rank's record as JSON.

    Returns:
        The records of all ranks, this one's included, in the order of the group's ranks.

    Raises:
        MessageError: A rank sent no such record, or one that is too long.
        RuntimeError: torch's collective failed, because a rank has exited or is late, for example.
    """
    message: MessageType[T] = MessageType(type(own), most_nbytes=most_nbytes)
    return [message.read(each) for each in gather_bytes(message.write(own).encode(), group)]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device for a group's tensors: the CPU if the group supports it, else the current CUDA device."""
    if "cpu" in device_types_of(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
