"""Exchange of a few numbers between all ranks, in one small all-reduce for which no host waits."""

import logging
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.run.all_reduces import AllReduce, Bucket

log = logging.getLogger("gradwire")


class NumberExchange:
    """Sends a few numbers of each rank to all ranks, in an all-reduce that begins at once and is read later.

    Every rank adds its own numbers to zeros, so the sums are exact, and any transport and plan will do. The all-reduce
    has ranks * numbers * 8 bytes, which reports do not count.

    On CUDA the current stream waits for it. Otherwise, what torch issues next on a group of its own (the buffers of
    DDP's next forward pass, the mean of a loss) would run beside it, and on a GPU without room for both each would wait
    for the other forever.

    Args:
        communicator: Communicator of the ranks. All of them make a `NumberExchange` at the same point of its launches.
        values: Numbers of this rank; finite, and equally many on every rank.
    """

    def __init__(self, communicator: Communicator, values: Sequence[float]) -> None:
        self._rows = communicator.size
        own, on_cuda = communicator.rank * len(values), communicator.device.type == "cuda"
        numbers = array("d", bytes(8 * self._rows * len(values)))
        numbers[own : own + len(values)] = array("d", values)
        host = torch.frombuffer(numbers, dtype=torch.float64)
        if on_cuda:
            host = host.pin_memory()
        flat = host.to(communicator.device, non_blocking=True)
        self._bucket = Bucket.of(flat)
        communicator.start(AllReduce((flat,), None, (self._bucket,), counted=False))
        self._host: Tensor = flat
        self._copied: torch.cuda.Event | None = None
        # Kept alive, because the device may still read it.
        self._source = host
        if on_cuda:
            self._host = torch.empty_like(host, pin_memory=True)
            with communicator.exclusive():
                # Makes the stream wait, not the host.
                self._bucket.result().wait()
                self._host.copy_(flat, non_blocking=True)
                self._copied = torch.cuda.current_stream(communicator.device).record_event()
            communicator.sync_current_stream()

    @property
    def has_come(self) -> bool:
        """True if `read` would return at once. Always False on CUDA, where the host must wait for the device."""
        future = self._bucket.future
        return self._copied is None and future is not None and future.done()

    def read(self) -> list[list[float]] | None:
        """Waits until the numbers of all ranks have arrived, and returns them.

        Returns:
            A list of numbers for each rank, in the order of the ranks; None if the all-reduce has failed. The executor
            has logged why, and the next bucket raises the error.
        """
        try:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                assert self._bucket.future is not None
                if isinstance(failed := self._bucket.future.wait(), BaseException):
                    raise RuntimeError(str(failed)) from failed
        except RuntimeError as error:
            log.debug("the numbers of the ranks were lost: %s", error)
            return None
        rows: list[list[float]] = self._host.view(self._rows, -1).tolist()
        return rows
