"""On CUDA a bucket's chunks are issued at once, by turns on two side streams, so that their phases overlap.

Nothing here makes the host wait. Each set of ranks has one communicator, whose collectives run in the order of issue.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STREAMS = 2
"""One for the chunk between the nodes, one for the chunk inside them."""


class SideStreams:
    """Two streams beside the one that computes.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]

    def begin(self, *tensors: Tensor) -> None:
        """Puts the streams behind what is on the current stream now.

        Args:
            tensors: Used on the streams from now on; kept from reuse until both are through with them.
        """
        computing = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(computing)
            for tensor in tensors:
                tensor.record_stream(stream)

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Makes the stream of one chunk the current one.

        Args:
            number: Of the chunk.
        """
        with torch.cuda.stream(self._streams[number % STREAMS]):
            yield

    @contextmanager
    def last(self) -> Iterator[None]:
        """Makes a stream the current one that is behind everything issued so far."""
        last, *others = self._streams
        for stream in others:
            last.wait_stream(stream)
        with torch.cuda.stream(last):
            yield

    def rejoin(self) -> None:
        """Puts the current stream behind everything issued so far."""
        computing = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            computing.wait_stream(stream)
