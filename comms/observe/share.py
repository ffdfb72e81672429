"""What ranks tell each other about themselves: a few numbers each, in one small all-reduce that no host waits for."""

import logging
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comms.communicator import Communicator
from gradwire.comms.run.all_reduces import AllReduce, Bucket

log = logging.getLogger("gradwire")


class Shared:
    """Numbers of every rank, on their way to all of them.

    Every rank adds its own to zeros, so sums are exact, and any transport and plan will do: ranks * numbers * 8 bytes,
    which reports do not count.

    On CUDA the current stream goes on behind it. What torch issues next on a group of its own (DDP the buffers of the
    next forward pass, a script the mean of its loss) would run beside it, and on a GPU without room for both they would
    wait for each other for ever.

    Args:
        communicator: All ranks share at the same point of its sequence of launches.
        values: As many on every rank, finite.
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
        self._source = host  # the device may still read it
        if on_cuda:
            self._host = torch.empty_like(host, pin_memory=True)
            with communicator.exclusive():
                self._bucket.result().wait()  # the stream, not the host
                self._host.copy_(flat, non_blocking=True)
                self._copied = torch.cuda.current_stream(communicator.device).record_event()
            communicator.sync_current_stream()

    @property
    def has_come(self) -> bool:
        """Whether `read` would not wait: known on a CPU; on CUDA the host has to wait for the device."""
        future = self._bucket.future
        return self._copied is None and future is not None and future.done()

    def read(self) -> list[list[float]] | None:
        """Every rank's numbers, in the order of the ranks; waits where they have not come.

        None where the all-reduce has failed: the executor has logged why, and the next bucket raises it.
        """
        try:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                assert self._bucket.future is not None
                if isinstance(failed := self._bucket.future.wait(), BaseException):
                    raise RuntimeError(str(failed)) from failed
        except RuntimeError as error:
            log.debug("what the ranks say of themselves was lost: %s", error)
            return None
        rows: list[list[float]] = self._host.view(self._rows, -1).tolist()
        return rows
