"""On CUDA a bucket's chunks are issued at once, by turns on two side streams, so that their phases overlap.

Nothing here makes the host wait. Collectives are issued in one order on all ranks, whatever the GPUs are doing, and
each set of ranks has one communicator, whose collectives run in the order of issue: while one chunk is between the
nodes, the next one is summed inside them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradwire.comms.futures import FutureTensor
from gradwire.comms.lanes import Hop

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

    def run(self, flat: Tensor, walks: Sequence[Iterator[Hop]]) -> FutureTensor:
        """Issues all steps of a bucket's chunks behind the work that is on the current stream now.

        Args:
            flat: The bucket, kept from reuse until both streams are through with it.
            walks: A generator for each chunk; each issues one phase up to the hop it yields.

        Returns:
            A future of `flat` on its device: who waits for it makes a stream wait, not the host.

        Raises:
            torch.OutOfMemoryError: A phase has found no memory. The current stream then waits for what was issued before:
                whoever catches the error may use the gradients at once.
        """
        computing = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(computing)
            flat.record_stream(stream)
        try:
            take_turns(walks, self._turn)
        except BaseException:
            for stream in self._streams:
                computing.wait_stream(stream)
            raise
        last, *others = self._streams
        for stream in others:
            last.wait_stream(stream)
        done: FutureTensor = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(last):
            done.set_result(flat)
        return done

    def _turn(self, number: int, walk: Iterator[Hop]) -> bool:
        with torch.cuda.stream(self._streams[number % STREAMS]):
            hop = next(walk, None)
            if hop is not None:
                hop.work.wait()
            return hop is not None


def take_turns(walks: Sequence[Iterator[Hop]], turn: Callable[[int, Iterator[Hop]], bool]) -> None:
    """Takes walks forward one step each by turns, every walk starting one round after the walk before it.

    Args:
        walks: Generators.
        turn: (number of the walk, the walk) -> whether it goes on.
    """
    coming = deque(enumerate(walks))
    running: list[tuple[int, Iterator[Hop]]] = []
    while coming or running:
        if coming:
            running.append(coming.popleft())
        running = [(number, walk) for number, walk in running if turn(number, walk)]
