"""What the fake GPUs of one test know: their streams, what was found, what was issued, and who waits for whom."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fake_cuda.clocks import HOST, Access, Block, Fault, Site, Timeline, handed_out_too_early, runs, site, spell


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host blocked until a stream was through."""

    device: int
    op: str
    where: Site
    forbidden: bool
    """It happened under `Machine.forbid_host_waits`."""
    late: bool
    """All that it waited for had been issued before that block began: a step later, a GPU is through with it."""

    def __str__(self) -> str:
        return f"host wait on cuda:{self.device}: {self.op}, at {spell(self.where)}"


@dataclass(frozen=True, slots=True)
class Forbidden:
    """Where the streams of a device were when host waits were forbidden, and whether waits for that are allowed."""

    ticks: dict[int, int]
    late_is_allowed: bool


@dataclass(slots=True)
class Entry:
    """One operation in the order in which the host of one rank issued it; plain data.

    Attributes:
        rank: Index of the device.
        kind: `kernel`, `copy`, `collective` or `host wait`.
        op: Name of the operation.
        stream: Number of the stream, the same for all operations of one stream.
        stream_name: For people.
        tick: Its number on that stream, from 1 on. An operation begins when the one before it on its stream is done.
        waits: (stream, tick) pairs that must be done before it begins, besides its predecessor on its stream.
        read_nbytes: Bytes read.
        written_nbytes: Bytes written.
        communicator: Number of the communicator, the same on all its members; None for what is no collective.
        members: Its ranks.
        sequence: Of the collective in its communicator, from 0 on.
        where: Source line.
    """

    rank: int
    kind: str
    op: str
    stream: int
    stream_name: str
    tick: int
    waits: list[tuple[int, int]]
    read_nbytes: int
    written_nbytes: int
    communicator: int | None = None
    members: tuple[int, ...] = ()
    sequence: int | None = None
    where: str = ""


@dataclass(slots=True, eq=False)
class Device:
    """One fake GPU.

    Attributes:
        index: Its number, and its rank's.
        default: The stream that is current where none was set.
        host: The clock of the host thread that drives it.
        host_version: Changes with the host's clock.
        schedule: What was issued.
        forbidden: What `forbid_host_waits` asks for.
        allocated_nbytes: In blocks that are held now.
        peak_nbytes: The most that ever was.
    """

    index: int
    default: Timeline = field(init=False)
    host: Timeline = field(init=False)
    host_version: int = 0
    timelines: list[Timeline] = field(default_factory=list)
    schedule: list[Entry] = field(default_factory=list)
    forbidden: "Forbidden | None" = None
    allocated_nbytes: int = 0
    peak_nbytes: int = 0

    def __post_init__(self) -> None:
        self.default = self.timeline("default")
        self.host = Timeline(f"{HOST} of cuda:{self.index}", self.index)

    def timeline(self, name: str) -> Timeline:
        """A new stream."""
        made = Timeline(f"cuda:{self.index} {name}", self.index)
        self.timelines.append(made)
        return made


class RaceError(AssertionError):
    """The recorder found faults; the message names all of them."""


class _PerThread(threading.local):
    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


class Machine:
    """The fake GPUs of all ranks, as `fake_cuda()` yields it."""

    def __init__(self, devices: int) -> None:
        self.devices = [Device(index) for index in range(devices)]
        self.faults: list[Fault] = []
        self.host_waits: list[HostWait] = []
        self.lock = threading.RLock()
        self.here = _PerThread()
        self._seen: set[tuple[str, Site, Site]] = set()
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    # What tests ask for.

    def check(self) -> None:
        """Raises what was found.

        Raises:
            RaceError: There were faults.
        """
        if self.faults:
            lines = "\n".join(map(str, self.faults))
            raise RaceError(f"{len(self.faults)} faults:\n{lines}")

    @contextmanager
    def forbid_host_waits(self, device: int | None = None, *, late: bool = False) -> Iterator[None]:
        """Inside it, every host wait of this rank is a fault.

        Args:
            device: Index of the rank's device; the current one by default.
            late: Allow waits for what was issued before the block began (a flag of the step before, say); they are in
                `host_waits`.
        """
        own = self.devices[self.here.device if device is None else device]
        before = own.forbidden
        own.forbidden = Forbidden({stream.number: stream.tick for stream in own.timelines}, late)
        try:
            yield
        finally:
            own.forbidden = before

    def schedule(self) -> list[list[dict[str, Any]]]:
        """What every rank has issued, in the order of issue, as plain data: see `Entry`."""
        return [[asdict(entry) for entry in device.schedule] for device in self.devices]

    # What the fakes tell.

    def access(
        self,
        stream: Timeline,
        op: str,
        reads: Sequence[tuple[Block, Tensor]],
        writes: Sequence[tuple[Block, Tensor]],
        kind: str = "kernel",
        **entry: Any,
    ) -> int:
        """Issues an operation on a stream, and checks what it touches; returns its number on that stream."""
        where = site()
        with self.lock:
            device = self.devices[stream.device]
            self.behind_host(device, stream)
            tick = stream.step()
            if stream is device.host:
                device.host_version += 1
            for accessed, write in ((reads, False), (writes, True)):
                for block, tensor in accessed:
                    for start, stop in runs(tensor):
                        access = Access(start, stop, stream, tick, write, op, where)
                        for old in block.note(access):
                            self._race(device.index, old, access)
            self._issued(device, stream, kind, op, tick, _nbytes(reads), _nbytes(writes), where, entry)
            return tick

    def host_wait(self, op: str, device: int, *streams: Timeline) -> None:
        """The host waits for streams."""
        with self.lock:
            own = self.devices[device]
            before = own.forbidden
            late = before is not None
            for stream in streams:
                own.host.join(stream.clock)
                late = late and before is not None and stream.tick <= before.ticks.get(stream.number, 0)
            own.host_version += 1
            where = site()
            wait = HostWait(device, op, where, before is not None, late)
            self.host_waits.append(wait)
            waits = [(stream.number, stream.tick) for stream in streams if stream.tick]
            self._issued(own, own.host, "host wait", op, own.host.step(), 0, 0, where, {"waits": waits})
            if before is not None and not (late and before.late_is_allowed):
                self._fault(Fault("host wait", device, f"{op} makes the host wait, at {spell(where)}", where, ()))

    def host_knows(self, device: int, clock: dict[int, int]) -> None:
        """The host has seen, without waiting, that this is done."""
        with self.lock:
            self.devices[device].host.join(clock)
            self.devices[device].host_version += 1

    def behind_host(self, device: Device, stream: Timeline) -> None:
        """Puts a stream's next operation behind what its host has waited for."""
        if stream.host_version != device.host_version and stream is not device.host:
            stream.join(device.host.clock)
            stream.host_version = device.host_version

    def wait(self, stream: Timeline, clock: dict[int, int], sources: list[tuple[int, int]]) -> None:
        """Makes a stream wait for an event: for its clock, which `sources` (stream, tick) sum up."""
        with self.lock:
            stream.join(clock)
            latest = dict(sorted([*stream.waits, *(each for each in sources if each[0] != stream.number)]))
            stream.waits = [(number, tick) for number, tick in latest.items() if tick]

    def current(self, device: int) -> Timeline:
        """The current stream of a device, on this thread."""
        set_here = self.here.streams.get(device)
        return set_here.timeline if set_here is not None else self.devices[device].default

    def new_block(self, nbytes: int, device: int, *, pinned: bool = False) -> Block:
        """Memory from the allocator, on the current stream; pinned memory belongs to the host."""
        own = self.devices[device]
        if pinned:
            return self._kept(Block(nbytes, None, device, None))
        stream = self.current(device)
        with self.lock:
            for where, access in handed_out_too_early(stream, own.host.clock):
                again = site()
                text = (
                    f"{access}; the memory was allocated on {stream.name}, at {spell(where)}, and let go before that "
                    f"stream was behind it; the allocator may hand it out again at {spell(again)} (record_stream, or a "
                    "wait, is missing)"
                )
                self._fault(Fault("reuse", device, text, access.where, where))
            own.allocated_nbytes += nbytes
            own.peak_nbytes = max(own.peak_nbytes, own.allocated_nbytes)
        return self._kept(Block(nbytes, stream, device, self._freed))

    def _kept(self, block: Block) -> Block:
        with self.lock:
            self._blocks.add(block)
        return block

    def _freed(self, block: Block) -> None:
        with self.lock:
            self.devices[block.device].allocated_nbytes -= block.nbytes
            block.let_go()

    def blocks(self) -> list[Block]:
        """The memory that tensors hold now, by address."""
        with self.lock:
            return sorted((block for block in self._blocks if block.nbytes), key=lambda block: block.base)

    def _race(self, device: int, first: Access, second: Access) -> None:
        text = f"nothing orders\n    {first} and\n    {second}"
        self._fault(Fault("race", device, text, first.where, second.where))

    def _fault(self, fault: Fault) -> None:
        key = (fault.kind, fault.first, fault.second)
        if key not in self._seen:
            self._seen.add(key)
            self.faults.append(fault)

    def _issued(
        self,
        device: Device,
        stream: Timeline,
        kind: str,
        op: str,
        tick: int,
        read_nbytes: int,
        written_nbytes: int,
        where: Site,
        more: dict[str, Any],
    ) -> None:
        waits = [*stream.waits, *more.pop("waits", ())]
        stream.waits.clear()
        text = spell(where[:1])
        device.schedule.append(
            Entry(
                device.index,
                kind,
                op,
                stream.number,
                stream.name,
                tick,
                waits,
                read_nbytes,
                written_nbytes,
                where=text,
                **more,
            )
        )


def _nbytes(accessed: Sequence[tuple[Block, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in accessed)


_active: list[Machine] = []


def machine() -> Machine:
    """The machine of the running test.

    Raises:
        RuntimeError: `fake_cuda()` is not open.
    """
    if not _active:
        raise RuntimeError("a fake CUDA tensor or stream outlives its `fake_cuda()`: use it inside the context")
    return _active[-1]


def activate(made: Machine) -> None:
    """Makes a machine the running test's."""
    _active.append(made)


def deactivate(made: Machine) -> None:
    """Ends it: blocks that are freed from now on are not looked at."""
    _active.remove(made)


def device_index(device: object = None) -> int:
    """The index that a device means: a torch.device, `cuda`, `cuda:1`, a number, or None for the current one."""
    if isinstance(device, int):
        return device
    if device is None:
        return machine().here.device
    index = torch.device(device).index  # type: ignore[call-overload]
    return machine().here.device if index is None else int(index)
