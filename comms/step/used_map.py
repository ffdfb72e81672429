"""Keeps DDP's all-reduce of the map of used parameters apart from gradwire's collectives.

DDP sums that map on its own communicator, in addition to the buckets. On CUDA that sum and a collective of gradwire can
wait for each other for ever if the GPU has no room for the kernels of both (comms/transport/launch_order.py), so they
must never be in flight together. With `find_unused_parameters` DDP issues the sum after the last bucket of a step, and
its stream waits for it in a callback at the end of backward; gradwire issues its own collectives of a step's end after
that callback. With `static_graph` DDP issues the sum before the first bucket of the first step, and nothing waits for
it. Without the DDP model the case is unknown: then NCCL has to keep the order.

From the map DDP learns which parameters no rank has used, and leaves their gradients as they are: the average of such a
parameter, with the residual that the compressor added to it, is lost. The gradients show whether DDP took an average,
even if the state was given no model, or the module inside the DDP model.

Source: torch/csrc/distributed/c10d/reducer.cpp, `all_reduce_local_used_map` and its callers (torch 2.13 to 2.15).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.step.listeners import Issues, StepListener
from gradwire.compressors.base import Layout


class UsedMap(StepListener):
    """Orders gradwire's collectives with DDP's sum of its map of used parameters, and finds averages that it ignored.

    Args:
        model: The model whose buckets arrive; only for a DDP model is it known whether DDP sums a map.
        device: Device of the buckets.
        unused: Called once a step, after DDP's part of it, with the parameters into whose `.grad` DDP did not copy the
            average; None if no residuals are kept, so that it does not matter.
    """

    def __init__(
        self,
        model: nn.Module | None,
        device: torch.device,
        unused: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        known = model if isinstance(model, DistributedDataParallel) else None
        self._device = device
        self._unused = unused
        self._in_first_step = known is not None and known.static_graph
        self._passed: list[tuple[Tensor, int, int, int]] = []
        """(parameter, address of its bucket's memory, address and version of its `.grad` when the bucket arrived)."""
        self._in_every_step = known is not None and known.find_unused_parameters and not known.static_graph
        self.wants_buckets = unused is not None and (known is None or self._in_every_step)

    @property
    def ends_after_ddp(self) -> bool:
        """Whether a step must end only after DDP's callback at the end of backward, which waits for DDP's used map."""
        return self._in_every_step or self.wants_buckets

    def step_began(self, steps: int) -> None:
        """Forgets the buckets of earlier passes; in the first step of a static graph on CUDA, waits on the host.

        It waits for all work of the device, because DDP has issued its sum there.
        """
        self._passed.clear()
        if steps == 0 and self._in_first_step and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def bucket_arrived(self, layout: Layout | None, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Notes where the gradients of a bucket's parameters lie before DDP replaces them by the averages.

        That is the address and version of each `.grad`, and the address of the bucket's memory: no values are kept.
        See `StepListener`.
        """
        memory = flat.untyped_storage().data_ptr()
        self._passed += [(parameter, memory, *_written(parameter)) for parameter in parameters]

    def last_bucket_sent(self, communicator: Issues) -> None:
        """Makes the current stream wait for all collectives of the step's buckets, so that DDP's sum follows them."""
        if self._in_every_step:
            communicator.sync_current_stream()

    def ddp_ended(self) -> None:
        """Calls `unused` with the parameters into whose `.grad` DDP did not copy the average of this backward pass."""
        if self._unused is not None:
            self._unused(self.unchanged())

    def unchanged(self) -> list[Tensor]:
        """Returns the parameters into whose `.grad` DDP has not copied the average, and forgets the backward pass.

        In the order of the buckets. Empty if DDP has copied none at all: then another reducer will do so later.
        """
        passed, self._passed = self._passed, []
        left = [
            parameter
            for parameter, memory, *before in passed
            if before == [*_written(parameter)]
            and (parameter.grad is None or parameter.grad.untyped_storage().data_ptr() != memory)
        ]
        return left if len(left) < len(passed) else []


def _written(parameter: Tensor) -> tuple[int, int]:
    """Returns (address, version) of a parameter's `.grad`, which change if it is written or replaced; else (0, 0)."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)
