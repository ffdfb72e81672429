"""Buffers for transfers in flight: none is used twice at a time, none is freed or resized while it is on its way."""

import threading

import torch
from torch import Tensor


class Pool:
    """Keeps buffers of finished transfers for the next step.

    On CUDA nothing is kept: torch's allocator already reuses memory, and knows which streams still read it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lock = threading.Lock()
        self.allocated = 0

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D buffer of exactly `numel` elements, its content undefined.

        Args:
            numel: Elements.
            like: Gives dtype and device.
        """
        with self._lock:
            free = self._free.get((like.dtype, numel))
            if free:
                return free.pop()
            self.allocated += 1
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer that `take` returned, once nothing reads or writes it any more."""
        if buffer.device.type != "cuda":
            with self._lock:
                self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)
