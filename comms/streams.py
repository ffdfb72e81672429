"""CUDA: two streams beside the one that computes, and the clock of the device. Nothing here makes the host wait.

Everything is issued at once, from the thread that runs backward, and ordered by streams: a chunk's phases follow each
other on one of two side streams, neighbouring chunks are on different ones. The caching allocator gives a block that
was freed back to the stream that it was allocated on, so whatever is used on another stream is noted there with
`record_stream`. Source: torch's notes on CUDA semantics, "Memory management" and `torch.Tensor.record_stream`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from gradwire.comms.bootstrap.compat import BackendWork

log = logging.getLogger("gradwire")

COPY_SECONDS = 2.0
"""Seconds for four bytes to the device, where nothing on its stream is before them."""

COPY_POLL_SECONDS = 0.001

POLL_SECONDS = 0.001
"""Seconds between two looks at a collective, where somebody waits for it on the host."""

STREAMS = 2
"""One for the chunk between the nodes, one for the chunk inside them."""

HIGH_PRIORITY = -1
"""Priority of the side streams: what a codec computes is short, and the network waits for it."""

VERDICT_PRIORITY = -2
"""Priority of the stream that a verdict is copied on: never 0.

Torch hands out 32 streams of each priority in turn (torch.cuda.Stream; c10/cuda/CUDAStream.h). Those of priority 0 run
the callbacks of futures, which wait for collectives: after 32 buckets every one of them is behind a lost collective,
and a copy would be, too. A device that has only 0 and -1 takes this for -1, which `SideStreams` alone asks for.
"""

Mark = float | torch.cuda.Event
"""A moment: seconds on the host, or an event on a stream."""


class Clock(Protocol):
    """What tells when something happened to gradients."""

    lag: int
    """Steps after which `between` waits for nothing."""

    @property
    def now(self) -> Callable[[], Mark]:
        """The moment that it is called at; on a device, at which everything before it on the current stream is done."""

    def between(self, first: Mark, last: Mark) -> float:
        """Seconds from one moment to another; waits for the device to reach both."""


class HostClock:
    """The clock of work that is done when the host has done it.

    Args:
        now: Seconds that only grow.
    """

    lag = 0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def between(self, first: Mark, last: Mark) -> float:
        """See `Clock.between`."""
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first


class DeviceClock:
    """The clock of work on a CUDA device: events on its streams, read a step later.

    Args:
        device: A CUDA device.
    """

    lag = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Mark:
        """See `Clock.now`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device.index))
        return event

    def between(self, first: Mark, last: Mark) -> float:
        """See `Clock.between`. Resolution 0.5 us."""
        assert not isinstance(first, float)
        assert not isinstance(last, float)
        first.synchronize()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class LateFlag:
    """A bool of the device that the host reads later, when the device has long passed it.

    Args:
        flag: 0-dim bool on a CUDA device; copied behind what is on the current stream now.
    """

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty(
            (), dtype=torch.bool, device="cpu", pin_memory=True
        )  # from torch's cache of pinned memory
        self._host.copy_(flag, non_blocking=True)
        self._copied = torch.cuda.current_stream(flag.device).record_event()

    def read(self) -> bool:
        """Its value; waits for the device where that has not come so far."""
        self._copied.synchronize()
        return bool(self._host)


class StepVerdict:
    """A number on the device that averages are multiplied by: 1, and NaN once gradwire has given up.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factor = torch.ones(1, dtype=torch.float32, device=device)
        self._bad = torch.full((1,), torch.nan, dtype=torch.float32, device="cpu", pin_memory=True)
        # Invariant: nothing that waits for a collective is ever put on this stream.
        self._stream = torch.cuda.Stream(device, VERDICT_PRIORITY)  # type: ignore[no-untyped-call]
        self._given_up = False
        self.apply_to(
            torch.ones(1, dtype=torch.float32, device=device)
        )  # loads the kernel, which beside a waiting collective may hang

    def apply_to(self, flat: Tensor) -> None:
        """Multiplies the first element on the current stream; the rest stays as it is.

        Args:
            flat: 1-D, floating-point, not empty; changed in place.
        """
        flat[:1].mul_(self._factor)

    def give_up(self) -> None:
        """Makes it NaN, before this returns, whatever the device waits for: a copy needs no multiprocessor. Any thread.

        A device that does not take a copy within `COPY_SECONDS` is lost itself.
        """
        if self._given_up:
            return
        self._given_up = True
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._factor.copy_(self._bad, non_blocking=True)
            copied = self._stream.record_event()
        deadline = time.monotonic() + COPY_SECONDS
        while not copied.query():
            if time.monotonic() > deadline:
                log.warning(
                    "%s does not respond: results of work in flight may be wrong; save no checkpoint, restart from the "
                    "last one",
                    self._device,
                )
                return
            time.sleep(COPY_POLL_SECONDS)


class IssuedWork:
    """The end of a collective that was issued without an event, in the shape of an event.

    Args:
        work: Torch's.
        given_up: Whether the communicator is being aborted. Then the work is not asked: it would wait for the abort,
            and keep the GIL.
    """

    def __init__(self, work: BackendWork, given_up: Callable[[], bool]) -> None:
        self._work = work
        self._given_up = given_up

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self._given_up() or self._work.is_completed()

    def synchronize(self) -> None:
        """Blocks the host until the device has passed it."""
        while not self.query():
            time.sleep(POLL_SECONDS)


class SideStreams:
    """Two streams of high priority beside the one that computes.

    One event orders them all: a stream that waits for it waits for what it was recorded behind by then, so it may be
    recorded anew at once (CUDA's `cudaStreamWaitEvent`). And torch is handed numbers of devices, and streams as context
    managers: `torch.cuda.stream` and an event for each edge take ten times as long on the host.

    Args:
        device: A CUDA device, with its index.

    Attributes:
        verdict: What averages are multiplied by.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.verdict = StepVerdict(device)
        self._reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._streams = [torch.cuda.Stream(device, HIGH_PRIORITY) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]

    def begin(self, numbers: Iterable[int], tensors: Iterable[Tensor]) -> None:
        """Puts the streams of some chunks behind what is on the current stream now.

        Args:
            numbers: Of the chunks.
            tensors: Used on those streams from now on; kept from reuse until they are through with them.
        """
        self._reached.record(torch.cuda.current_stream(self._index))
        for number in {number % STREAMS for number in numbers}:
            stream = self._streams[number]
            stream.wait_event(self._reached)
            for tensor in tensors:
                tensor.record_stream(stream)

    def of(self, number: int) -> AbstractContextManager[object]:
        """Makes the stream of one chunk the current one.

        Args:
            number: Of the chunk.
        """
        return cast(AbstractContextManager[object], self._streams[number % STREAMS])

    def mark(self, number: int) -> torch.cuda.Event:
        """An event behind everything on the stream of one chunk."""
        event: torch.cuda.Event = self._streams[number % STREAMS].record_event()
        return event

    def wait(self, number: int, events: Iterable[torch.cuda.Event]) -> None:
        """Puts the stream of one chunk behind some events."""
        for event in events:
            self._streams[number % STREAMS].wait_event(event)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Makes a stream the current one that is behind everything issued so far, and before what comes on the others.

        The stream that computes goes on beside it: `sync_current_stream` puts it behind.
        """
        first, *others = self._streams
        for before in (torch.cuda.current_stream(self._index), *others):
            self._put_behind(first, before)
        with first:
            yield
        for stream in others:
            self._put_behind(stream, first)

    def sync_current_stream(self) -> None:
        """Puts the current stream behind everything issued so far."""
        computing = torch.cuda.current_stream(self._index)
        for stream in self._streams:
            self._put_behind(computing, stream)

    def _put_behind(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._reached.record(before)
        stream.wait_event(self._reached)
