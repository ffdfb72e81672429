"""The map of used parameters, which DDP sums on its own communicator beside the buckets.

On CUDA that sum and gradwire's could wait for each other for ever, where a GPU has no room for the kernels of all of
them (comms/transport/launch_order.py), so they are never in flight together. With `find_unused_parameters` DDP issues
the sum after each step's last bucket, and its stream waits for it in a call of autograd's when backward has ended; what
gradwire issues for itself at the end of a step comes behind that call. With `static_graph` it is issued before the
first step's first bucket, and nothing waits. A state that has never seen its DDP model does not know of it: there
NCCL has to keep the order.

By that map DDP leaves the gradient of a parameter alone that no rank has used: its average, and with it what a
compressor has sent of what it held back, goes to nobody. Whether it has, shows in the gradients, also where a state has
been given no model, or the module inside of it, and nobody knows whether DDP has such a map.

Source: torch/csrc/distributed/c10d/reducer.cpp, `all_reduce_local_used_map` and who calls it (torch 2.13 to 2.15).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Issues(Protocol):
    """What issues the buckets' collectives."""

    def sync_current_stream(self) -> None:
        """Puts the current stream behind everything that was issued (on CUDA)."""


class UsedMap:
    """Keeps DDP's sum of the map away from gradwire's collectives, on CUDA; tells which averages DDP does not take.

    Args:
        model: Whose buckets come; only a DDP model tells what it sums.
        holds_back: Something may be held back of gradients: then it counts which averages DDP has taken.
    """

    def __init__(self, model: nn.Module | None, *, holds_back: bool = False) -> None:
        known = model if isinstance(model, DistributedDataParallel) else None
        self._in_first_step = known is not None and known.static_graph
        self._handed_over: list[tuple[Tensor, int, int, int]] = []
        """A step's parameters, where their bucket lies, and the state of their gradients then."""
        self._in_every_step = known is not None and known.find_unused_parameters and not known.static_graph
        self._looks = holds_back and (known is None or self._in_every_step)

    def bucket_came(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """DDP has handed over a bucket, whose average takes the place of `flat`."""
        if self._looks:
            memory = flat.untyped_storage().data_ptr()
            self._handed_over += [(parameter, memory, *_written(parameter)) for parameter in parameters]

    def left_alone(self) -> list[Tensor]:
        """The parameters whose averages DDP has not taken, now that it has ended a backward pass; once a step.

        None where all would be: no DDP takes averages then, but somebody else, later.
        """
        handed_over, self._handed_over = self._handed_over, []
        left = [
            parameter
            for parameter, memory, *before in handed_over
            if before == [*_written(parameter)]
            and (parameter.grad is None or parameter.grad.untyped_storage().data_ptr() != memory)
        ]
        return left if len(left) < len(handed_over) else []

    @property
    def ends_backward(self) -> bool:
        """Whether a step ends behind the last of autograd's calls so far.

        There DDP's stream waits for the sum, and DDP takes the averages.
        """
        return self._in_every_step or self._looks

    def step_begins(self, device: torch.device, step: int) -> None:
        """A step's first bucket has come, and nothing is issued yet; the host waits for the sum in the first one.

        Args:
            device: Of the bucket.
            step: Steps before this one.
        """
        self._handed_over.clear()
        if step == 0 and self._in_first_step and device.type == "cuda":
            torch.cuda.synchronize(device)

    def last_is_issued(self, communicator: Issues) -> None:
        """The collectives of a step's last bucket are issued: DDP's stream goes on behind all of them."""
        if self._in_every_step:
            communicator.sync_current_stream()


def _written(parameter: Tensor) -> tuple[int, int]:
    """What changes when a parameter's gradient is written or replaced."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)
