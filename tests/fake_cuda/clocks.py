"""Vector clocks of streams, blocks of memory, and the two laws that every access is checked against.

A stream's clock says, for each stream, up to which of its operations everything is done before the next operation of
this one begins. An operation adds one to its own stream's entry; an event is a copy of the clock, and a stream that
waits for it takes the larger of both, entry by entry. The host has a clock too: what it has waited for is done before
whatever it issues later on any stream.

Source: Mattern, Virtual Time and Global States of Distributed Systems, 1989 (vector clocks); Flanagan and Freund,
FastTrack, PLDI 2009 (races found with them). The rule of reuse is that of torch's caching allocator
(c10/cuda/CUDACachingAllocator.cpp): a freed block may be handed out again at once on the stream that it was allocated
on; on streams named by `record_stream` the allocator records an event when it is freed, and waits for that. So memory
that comes back while another stream may still use it is watched until its own stream is behind that, and it is a fault
if anything is allocated on its stream before.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor

Clock = dict[int, int]
"""Number of a stream -> how many of its operations are known to be done."""

HOST = "host"
FRAMES = 4
"""Lines of the caller that are kept for each access."""
MOST_RUNS = 64
"""A tensor with more gaps than that counts as one run from its first byte to its last."""

_numbers = itertools.count()
_TOOL = str(Path(__file__).parent)
_NOT_THE_USER = (str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))
_skipped: dict[CodeType, bool] = {}

Site = tuple[tuple[str, int, str], ...]
"""File, line and function, innermost first."""


def site() -> Site:
    """Where the running operation was called: lines of neither torch, nor Python's own library, nor this tool."""
    found: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < FRAMES:
        code = frame.f_code
        skip = _skipped.get(code)
        if skip is None:
            name = code.co_filename
            own = name.startswith(_TOOL) and not Path(name).name.startswith("test_")
            skip = _skipped[code] = own or name.startswith("<") or name.startswith(_NOT_THE_USER)
            if "site-packages" in name and not name.startswith(_NOT_THE_USER[0]):
                skip = _skipped[code] = "gradwire" not in name
        if not skip:
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def spell(where: Site) -> str:
    """A site on one line, innermost first."""
    return " < ".join(f"{_short(file)}:{line} {name}" for file, line, name in where) or "unknown"


@lru_cache(maxsize=4096)
def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


@dataclass(eq=False, slots=True)
class Timeline:
    """A stream as the clocks see it; the host is one as well.

    Attributes:
        name: For people: `cuda:0 default`, `cuda:0 side 1`, `cuda:0 nccl 3`.
        device: Index of its device.
        clock: What is done before its next operation begins.
        waits: (stream, tick) pairs that it was made to wait for since its last operation.
        host_version: Of the host's clock, as this stream last saw it.
    """

    name: str
    device: int
    number: int = field(default_factory=_numbers.__next__)
    clock: Clock = field(default_factory=dict)
    waits: list[tuple[int, int]] = field(default_factory=list)
    host_version: int = -1
    freed: list[tuple["Site", list["Access"]]] = field(default_factory=list)
    """Memory that came back to this stream while others might still use it: where it was allocated, and by whom."""

    @property
    def tick(self) -> int:
        """Operations issued on it so far."""
        return self.clock.get(self.number, 0)

    def step(self) -> int:
        """Issues an operation; returns its number, from 1 on."""
        tick = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return tick

    def join(self, other: Clock) -> None:
        """Is behind everything that `other` knows to be done."""
        own = self.clock
        for number, tick in other.items():
            if own.get(number, 0) < tick:
                own[number] = tick


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of a run of bytes of a block."""

    start: int
    stop: int
    stream: Timeline
    tick: int
    write: bool
    op: str
    where: Site

    def __str__(self) -> str:
        verb = "writes" if self.write else "reads"
        return f"{self.op} {verb} bytes {self.start} to {self.stop} on {self.stream.name}, at {spell(self.where)}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What was found: `kind` is `race`, `reuse` or `host wait`."""

    kind: str
    device: int
    text: str
    first: Site
    second: Site

    def __str__(self) -> str:
        return f"{self.kind} on cuda:{self.device}: {self.text}"


class Block:
    """A piece of memory as the allocator hands it out: every tensor that views it holds it.

    Args:
        nbytes: Its size.
        stream: Current when it was allocated: where it goes back to. None for pinned host memory.
        device: Index of the device that it belongs to.
        freed: Called with the block when nothing holds it any more.
    """

    __slots__ = (
        "__weakref__",
        "accesses",
        "base",
        "covered",
        "device",
        "freed",
        "nbytes",
        "recorded",
        "stream",
        "where",
    )

    def __init__(
        self, nbytes: int, stream: Timeline | None, device: int, freed: Callable[["Block"], None] | None
    ) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.device = device
        self.freed = freed
        self.where = site()
        self.base = 0
        """Its address, once a tensor is in it."""
        self.accesses: list[Access] = []
        self.recorded: dict[int, Timeline] = {}
        """Streams named by `record_stream`."""
        self.covered: set[tuple[int, int]] = set()
        """(stream, tick) of operations that somebody has seen done before the block was let go (NCCL's watchdog)."""

    def __del__(self) -> None:
        if self.freed is not None:
            self.freed(self)

    def note(self, access: Access) -> list[Access]:
        """Takes down an access; returns the earlier ones that nothing orders before it, although they conflict."""
        clock, own = access.stream.clock, access.stream
        conflicts: list[Access] = []
        kept: list[Access] = []
        for old in self.accesses:
            if old.stop <= access.start or access.stop <= old.start:
                kept.append(old)
                continue
            ordered = old.stream is own or clock.get(old.stream.number, 0) >= old.tick
            if not ordered and (old.write or access.write):
                conflicts.append(old)
            inside = access.start <= old.start and old.stop <= access.stop
            # What comes after this access comes after an access that is ordered before it, too.
            if not (ordered and inside and (access.write or not old.write)):
                kept.append(old)
        kept.append(access)
        self.accesses = kept
        return conflicts

    def let_go(self) -> None:
        """Gives the memory back to its stream."""
        if self.stream is None:
            return
        # The events that the allocator records now on the recorded streams cover what those streams are behind, too.
        covered: Clock = {}
        for stream in self.recorded.values():
            for number, tick in stream.clock.items():
                covered[number] = max(covered.get(number, 0), tick)
        watched = [
            access
            for access in self.accesses
            if access.stream is not self.stream
            and covered.get(access.stream.number, 0) < access.tick
            and (access.stream.number, access.tick) not in self.covered
        ]
        if watched:
            self.stream.freed.append((self.where, watched))


def handed_out_too_early(stream: Timeline, host: Clock) -> Iterator[tuple[Site, Access]]:
    """What may still be under way in memory that the allocator may hand out now, where it was allocated before.

    Args:
        stream: On which something is allocated.
        host: What the host has waited for.
    """
    freed, stream.freed = stream.freed, []
    for where, watched in freed:
        for access in watched:
            number, tick = access.stream.number, access.tick
            if stream.clock.get(number, 0) < tick and host.get(number, 0) < tick:
                yield where, access


def runs(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """The runs of bytes that a strided tensor occupies in its storage, ascending where its strides are."""
    numel = tensor.numel()
    if numel == 0:
        return ()
    width = tensor.element_size()
    first = int(tensor.storage_offset()) * width
    if tensor.is_contiguous():
        return ((first, first + numel * width),)
    length, count = 1, 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride == length and not outer:
            length *= size
        else:
            outer.append((stride, size))
            count *= size
    if count > MOST_RUNS:
        last = sum(stride * (size - 1) for stride, size in outer) + length
        return ((first, first + last * width),)
    starts = [0]
    for stride, size in outer:
        starts = [start + index * stride for start in starts for index in range(size)]
    return tuple((first + start * width, first + (start + length) * width) for start in starts)
