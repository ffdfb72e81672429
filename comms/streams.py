"""Side streams for communication on CUDA, and the clocks of host and device. Nothing here makes the host wait.

Everything is issued at once from the thread that runs the backward pass, and streams keep the order: the phases of a
chunk run on one of two side streams, and neighbouring chunks on different ones. The caching allocator returns a freed
block to the stream that it was allocated on, so tensors used on another stream are marked with `record_stream`.

Source: torch's notes on CUDA semantics, "Memory management" and `torch.Tensor.record_stream`.
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
"""Timeout of copying four bytes to the device on a stream with nothing before them."""

COPY_POLL_SECONDS = 0.001

POLL_SECONDS = 0.001
"""Seconds between two checks of a collective for which the host waits."""

STREAMS = 2
"""Number of side streams: one for the chunk between the nodes, one for the chunk inside them."""

HIGH_PRIORITY = -1
"""Priority of the side streams: codec kernels are short, and the network waits for them."""

VERDICT_PRIORITY = -2
"""Priority of the stream that a verdict is copied on: never 0.

Torch hands out 32 streams of each priority in turn (torch.cuda.Stream; c10/cuda/CUDAStream.h). Those of priority 0 run
the callbacks of futures, which wait for collectives: after 32 buckets every one of them is behind a lost collective,
and a copy would be, too. A device that has only 0 and -1 takes this for -1, which `SideStreams` alone asks for.
"""

Mark = float | torch.cuda.Event
"""A time: seconds of the host's clock, or an event on a stream."""


class Clock(Protocol):
    """Protocol of clocks of work on gradients: `HostClock`, or `DeviceClock` with events of a device.

    Attributes:
        lag: Number of steps after which `between` need not wait for the device: 0 on a CPU, 1 on CUDA.
    """

    lag: int

    @property
    def now(self) -> Callable[[], Mark]:
        """Function that returns the present time: seconds, or an event recorded on the current stream of a device."""

    def between(self, first: Mark, last: Mark) -> float:
        """Returns the seconds between two times; blocks the host until the device has reached both.

        Args:
            first: The earlier time.
            last: The later time.
        """


class HostClock:
    """Measures times of work on the CPU.

    Args:
        now: Returns monotonic seconds.
    """

    lag = 0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def between(self, first: Mark, last: Mark) -> float:
        """Returns the seconds between two times of this clock."""
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first


class DeviceClock:
    """Measures times of work on a CUDA device, by events on its streams, which are read a step later.

    Args:
        device: A CUDA device.
    """

    lag = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Mark:
        """Records an event on the current stream and returns it: it stands for the time when the device reaches it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device.index))
        return event

    def between(self, first: Mark, last: Mark) -> float:
        """Returns the seconds between two events, in steps of 0.5 us; blocks the host until the device reaches both."""
        assert not isinstance(first, float)
        assert not isinstance(last, float)
        first.synchronize()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class LateFlag:
    """Copies a bool from the device, for the host to read one step later without having to wait then.

    Args:
        flag: 0-dim bool tensor on a CUDA device; copied after the work on the current stream.
    """

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty(
            (), dtype=torch.bool, device="cpu", pin_memory=True
        )  # from torch's cache of pinned memory
        self._host.copy_(flag, non_blocking=True)
        self._copied = torch.cuda.current_stream(flag.device).record_event()

    def read(self) -> bool:
        """Returns the value; blocks the host if the device has not computed it yet."""
        self._copied.synchronize()
        return bool(self._host)


class StepVerdict:
    """Multiplies one element of a step's last bucket by a factor on the device: 1, or NaN after an abort.

    The host may have issued the optimizer's step by then: with the NaN it does not end as if nothing were wrong. The
    other averages of that step have undefined values.

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
        )  # Loads the kernel now: loading it while a collective waits may hang.

    def apply_to(self, flat: Tensor) -> None:
        """Multiplies the first element by the factor, on the current stream.

        Args:
            flat: 1-D, floating-point, not empty; changed in place.
        """
        flat[:1].mul_(self._factor)

    def give_up(self) -> None:
        """Sets the factor to NaN, even while the device waits for a collective, and returns when it is set. Any thread.

        A copy needs no multiprocessor. If the device does not execute it within 2 s (`COPY_SECONDS`), or has failed, a
        warning is logged, and the factor may still be 1. It raises nothing then: the other ranks are still to be told.
        """
        if self._given_up:
            return
        self._given_up = True
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._factor.copy_(self._bad, non_blocking=True)
                copied = self._stream.record_event()
            deadline = time.monotonic() + COPY_SECONDS
            while not copied.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a copy took more than {COPY_SECONDS:g} s")
                time.sleep(COPY_POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            log.warning(
                "%s does not respond (%s): results of work in flight may be wrong; save no checkpoint, restart from "
                "the last one",
                self._device,
                error,
            )


class IssuedWork:
    """Stands for the end of a collective that was issued without an event, with the methods of an event.

    Args:
        work: torch's work of the collective.
        given_up: Returns whether the communicator is being aborted. The work is not queried then: it would wait for the
            abort while it holds the GIL.
    """

    def __init__(self, work: BackendWork, given_up: Callable[[], bool]) -> None:
        self._work = work
        self._given_up = given_up

    def query(self) -> bool:
        """Returns whether the collective is done; True also while the communicator is being aborted."""
        return self._given_up() or self._work.is_completed()

    def synchronize(self) -> None:
        """Blocks the host until the collective is done, or the communicator is being aborted.

        In the latter case the collective may still run on the device. It raises no error, whatever has failed.
        """
        while not self.query():
            time.sleep(POLL_SECONDS)


class SideStreams:
    """Manages two streams of high priority, in addition to the current stream that computes.

    One event orders them all: `cudaStreamWaitEvent` waits for the work that the event captured at the call, so it can
    be recorded again at once. Devices are passed to torch by number and streams are used as context managers, because
    `torch.cuda.stream` and an event for each dependency take ten times as long on the host.

    Args:
        device: CUDA device with an index.

    Attributes:
        verdict: Factor that makes averages NaN after an abort.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.verdict = StepVerdict(device)
        self._reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._streams = [torch.cuda.Stream(device, HIGH_PRIORITY) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]

    def begin(self, numbers: Iterable[int], tensors: Iterable[Tensor]) -> None:
        """Makes the side streams of some chunks wait for the work issued on the current stream; the host does not wait.

        Args:
            numbers: Numbers of the chunks; even and odd ones have a stream each.
            tensors: Tensors used on those streams from now on; their memory is not reused before these are done.
        """
        self._reached.record(torch.cuda.current_stream(self._index))
        for number in {number % STREAMS for number in numbers}:
            stream = self._streams[number]
            stream.wait_event(self._reached)
            for tensor in tensors:
                tensor.record_stream(stream)

    def of(self, number: int) -> AbstractContextManager[object]:
        """Returns a context in which the stream of one chunk is the current stream.

        Args:
            number: Number of the chunk.
        """
        return cast(AbstractContextManager[object], self._streams[number % STREAMS])

    def mark(self, number: int) -> torch.cuda.Event:
        """Records an event after the work issued on the stream of one chunk so far, and returns it."""
        event: torch.cuda.Event = self._streams[number % STREAMS].record_event()
        return event

    def wait(self, number: int, events: Iterable[torch.cuda.Event]) -> None:
        """Makes the stream of one chunk, not the host, wait for events.

        Args:
            number: Number of the chunk.
            events: Events on other streams.
        """
        for event in events:
            self._streams[number % STREAMS].wait_event(event)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Makes a context in which a side stream is current that runs after all earlier work, and before all later one.

        Earlier work is all that was issued on the current and the side streams, later work all on the side streams.
        Neither the host nor the stream that computes waits, unless `sync_current_stream` is called.
        """
        first, *others = self._streams
        for before in (torch.cuda.current_stream(self._index), *others):
            self._put_behind(first, before)
        with first:
            yield
        for stream in others:
            self._put_behind(stream, first)

    def sync_current_stream(self) -> None:
        """Makes the current stream, not the host, wait for everything issued on the side streams so far."""
        computing = torch.cuda.current_stream(self._index)
        for stream in self._streams:
            self._put_behind(computing, stream)

    def _put_behind(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        """Makes a stream wait for the work that was issued on another one so far."""
        self._reached.record(before)
        stream.wait_event(self._reached)
