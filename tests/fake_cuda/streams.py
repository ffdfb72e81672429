"""Fakes of torch.cuda's streams, events and futures: the same methods, on vector clocks.

What torch does at each of them was read in its sources: a `Stream` orders nothing by itself, also not against the
default stream (torch makes its streams non-blocking); an event that was never recorded blocks nobody; `wait_stream`
records an event and waits for it. A future on CUDA (ATen/core/ivalue_inl.h) records an event on the stream that is
current at `set_result`, but only for devices of tensors in its value; `wait()` makes the current stream wait for it and
records that stream on those tensors' memory; a callback runs on a stream from the pool that has waited first.
"""

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from fake_cuda.clocks import Block, Clock, Timeline
from fake_cuda.machine import device_index, machine

RealFuture = torch.futures.Future
CUDA_DEVICE_TYPE = 1
"""c10::DeviceType::CUDA (torch/headeronly/core/DeviceType.h)."""
WAIT_SECONDS = 60.0
"""How long the host waits for a future that another thread completes: longer than any test takes."""


class FakeStream:
    """In the place of torch.cuda.Stream; every one is a stream of its own, where torch hands out 32 in turn."""

    def __init__(self, device: object = None, priority: int = 0, **more: object) -> None:
        index = device_index(device)
        self.device = torch.device("cuda", index)
        self.priority = priority
        own = machine().devices[index]
        given = more.get("timeline")
        name = f"{'high-priority ' if priority < 0 else ''}stream {len(own.timelines)}"
        self.timeline: Timeline = given if isinstance(given, Timeline) else own.timeline(name)

    @property
    def device_index(self) -> int:
        """Of its device."""
        return self.timeline.device

    @property
    def device_type(self) -> int:
        """That of CUDA."""
        return CUDA_DEVICE_TYPE

    @property
    def stream_id(self) -> int:
        """Unique."""
        return self.timeline.number

    @property
    def cuda_stream(self) -> int:
        """In the place of the pointer."""
        return self.timeline.number

    def wait_event(self, event: "FakeEvent") -> None:
        """Later work here waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: "FakeStream") -> None:
        """Later work here waits for what is on the other stream now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        """An event behind what is on this stream now."""
        event = FakeEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        machine().host_wait("Stream.synchronize", self.timeline.device, self.timeline)

    def query(self) -> bool:
        """Whether all is done: only where the host has waited for it, as a GPU may take as long as it likes."""
        own = machine().devices[self.timeline.device]
        return own.host.clock.get(self.timeline.number, 0) >= self.timeline.tick

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As on real GPUs: least, greatest."""
        return 0, -5

    def __enter__(self) -> Self:
        self._context = FakeStreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.timeline is self.timeline

    def __hash__(self) -> int:
        return hash(self.timeline.number)

    def __repr__(self) -> str:
        return f"<fake {self.timeline.name}>"


class FakeEvent:
    """In the place of torch.cuda.Event. `query` is False when it is first asked and True from then on: code must live
    with both.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._clock: Clock = {}
        self._source: Timeline | None = None
        self._tick = 0
        self._sources: list[tuple[int, int]] = []
        self._at = 0
        self._asked = False

    def record(self, stream: FakeStream | None = None) -> None:
        """Is behind what is on the stream now."""
        source = current_stream().timeline if stream is None else stream.timeline
        with machine().lock:
            own = machine().devices[source.device]
            machine().behind_host(own, source)
            self._clock, self._source, self._tick = dict(source.clock), source, source.tick
            self._sources = [(source.number, source.tick), *source.waits]
            self._at, self._asked = len(own.schedule), False

    def wait(self, stream: FakeStream | None = None) -> None:
        """Makes a stream, by default the current one, wait; nothing where it was not recorded."""
        target = current_stream().timeline if stream is None else stream.timeline
        if self._source is not None:
            machine().wait(target, self._clock, self._sources)

    def query(self) -> bool:
        """Whether it is done."""
        if self._source is None or self.known:
            return True
        if not self._asked:
            self._asked = True
            return False
        machine().host_knows(self._source.device, self._clock)
        return True

    @property
    def known(self) -> bool:
        """Whether the host has seen that it is done."""
        if self._source is None:
            return True
        seen = machine().devices[self._source.device].host.clock
        behind = [*self._clock.items(), (self._source.number, self._tick)]  # also what the stream has only waited for
        return all(seen.get(number, 0) >= tick for number, tick in behind)

    def synchronize(self) -> None:
        """The host waits, unless it has seen it done."""
        if self._source is not None and not self.known:
            done = Timeline(self._source.name, self._source.device, self._source.number, dict(self._clock))
            machine().host_wait("Event.synchronize", self._source.device, done)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds: one thousandth for each operation that the host issued between them.

        Raises:
            RuntimeError: One was not recorded, has no timing, or is not known to be done.
        """
        if self._source is None or end._source is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.known and end.known):
            raise RuntimeError("CUDA error: device not ready: one of the events has not been waited for")
        return (end._at - self._at) * 1e-3

    @property
    def clock(self) -> Clock:
        """What is done when it is."""
        return self._clock


class FakeStreamContext:
    """In the place of torch.cuda.stream."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream
        self._before: FakeStream | None = None
        self._device = 0

    def __enter__(self) -> None:
        if self.stream is not None:
            here = machine().here
            self._device, here.device = here.device, self.stream.device_index
            self._before = here.streams.get(self.stream.device_index)
            here.streams[self.stream.device_index] = self.stream

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            here = machine().here
            here.device = self._device
            if self._before is None:
                here.streams.pop(self.stream.device_index, None)
            else:
                here.streams[self.stream.device_index] = self._before


class FakeDeviceContext:
    """In the place of torch.cuda.device."""

    def __init__(self, device: object) -> None:
        self._index = device_index(device)

    def __enter__(self) -> None:
        self._before = machine().here.device
        machine().here.device = self._index

    def __exit__(self, *error: object) -> None:
        machine().here.device = self._before


def current_stream(device: object = None) -> FakeStream:
    """In the place of torch.cuda.current_stream."""
    index = device_index(device)
    found = machine().here.streams.get(index)
    return found if found is not None else default_stream(index)


def default_stream(device: object = None) -> FakeStream:
    """In the place of torch.cuda.default_stream."""
    index = device_index(device)
    return FakeStream(index, timeline=machine().devices[index].default)


def side_stream(priority: int = 0) -> Any:
    """What `torch.cuda.Stream(priority=priority)` makes; of any type, as torch's annotations know their own only."""
    return FakeStream(priority=priority)


def set_stream(stream: FakeStream | None) -> None:
    """In the place of torch.cuda.set_stream."""
    if stream is not None:
        machine().here.streams[stream.device_index] = stream
        machine().here.device = stream.device_index


def synchronize(device: object = None) -> None:
    """In the place of torch.cuda.synchronize."""
    index = device_index(device)
    machine().host_wait("torch.cuda.synchronize", index, *machine().devices[index].timelines)


def blocks_of(value: object) -> list[Block]:
    """The blocks of the fake tensors in a value: itself, or in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        block = getattr(value, "block", None)
        return [block] if block is not None and block.stream is not None else []
    if isinstance(value, list | tuple | set):
        return [block for each in value for block in blocks_of(each)]
    if isinstance(value, dict):
        return blocks_of(list(value.values()))
    return []


class FakeFuture(RealFuture):  # type: ignore[type-arg]  # generic in annotations only
    """In the place of torch.futures.Future, on any device."""

    def __class_getitem__(cls, _: object) -> "type[FakeFuture]":
        return cls

    def __new__(cls, *, devices: object = None) -> Self:
        return super().__new__(cls)

    def __init__(self, *, devices: "list[int | str | torch.device] | None" = None) -> None:
        super().__init__()
        self._devices = [
            torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in devices or ()
        ]
        self._changed = threading.Condition()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._events: list[FakeEvent] = []
        self._blocks: list[Block] = []
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether it has a value or an error; on CUDA the value may still be computed."""
        return self._done

    def set_result(self, result: Any) -> None:
        """Completes it; the value is there when the current streams are through."""
        blocks = blocks_of(result) if self._devices else []
        used = {block.device for block in blocks}
        missing = used - {device_index(device) for device in self._devices}
        if missing:
            raise ValueError(
                f"The result contained tensors residing on device(s) cuda:{sorted(missing)} which are not "
                "among the expected device(s)"
            )
        events = [current_stream(index).record_event() for index in sorted(used)]
        self._complete(result, None, events, blocks)

    def set_exception(self, result: BaseException) -> None:
        """Completes it with an error."""
        self._complete(None, result, [], [])

    def _complete(self, value: Any, error: BaseException | None, events: list[FakeEvent], blocks: list[Block]) -> None:
        with self._changed:
            if self._done:
                raise RuntimeError("Attempting to mark a completed Future as complete again")
            self._value, self._error, self._events = value, error, events
            self._blocks = list({id(block): block for block in blocks}.values()) if value is not None else []
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            self._call(callback)

    def value(self) -> Any:
        """The value, without any waiting."""
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> Any:
        """Blocks until it is completed, then makes the current streams wait for the value."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, WAIT_SECONDS):
                raise TimeoutError(f"a future was not completed within {WAIT_SECONDS:g} s")
        self._join_current_streams()
        return self.value()

    def then(self, callback: Any) -> "FakeFuture":
        """A future of what the callback returns, which gets this one."""
        child = FakeFuture(devices=list(self._devices))

        def run() -> None:
            try:
                result = callback(self)
            except Exception as error:  # noqa: BLE001 - as torch does, the child carries it
                text = f"Got the following error when running the callback: {type(error).__name__}: {error}"
                child.set_exception(RuntimeError(text))
            else:
                child.set_result(result)

        self._later(run)
        return child

    def add_done_callback(self, callback: Any) -> None:
        """Calls back with this future."""
        self._later(lambda: callback(self))

    def _later(self, run: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(run)
                return
        self._call(run)

    def _call(self, run: Callable[[], None]) -> None:
        contexts = [FakeStreamContext(pool_stream(device_index(device))) for device in self._devices]
        for context in contexts:
            context.__enter__()
        try:
            self._join_current_streams()
            run()
        finally:
            for context in reversed(contexts):
                context.__exit__()

    def _join_current_streams(self) -> None:
        for event in self._events:
            assert event._source is not None
            event.wait(current_stream(event._source.device))
        for block in self._blocks:
            timeline = current_stream(block.device).timeline
            block.recorded[timeline.number] = timeline


def pool_stream(index: int) -> FakeStream:
    """What a future's callback runs on."""
    own = machine().devices[index]
    return FakeStream(index, timeline=own.timeline(f"pool {len(own.timelines)}"))


def collect_all(futures: list[FakeFuture]) -> FakeFuture:
    """In the place of torch.futures.collect_all."""
    devices: list[int | str | torch.device] = list(dict.fromkeys(each for one in futures for each in one._devices))
    gathered, left, lock = FakeFuture(devices=devices), [len(futures)], threading.Lock()

    def one_more(_: object) -> None:
        with lock:
            left[0] -= 1
            done = left[0] == 0
        if done:
            for future in futures:
                future._join_current_streams()
            gathered.set_result(list(futures))

    if not futures:
        gathered.set_result([])
    for future in futures:
        future.add_done_callback(one_more)
    return gathered


def wait_all(futures: list[FakeFuture]) -> list[Any]:
    """In the place of torch.futures.wait_all."""
    return [future.wait() for future in futures]
