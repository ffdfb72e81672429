"""Point-to-point messages, as pipelines send them: who has not sent what, and who waits for it.

Torch's flight recorder notes none of gloo's. So while a watch runs, `ProcessGroup.send` and `recv`, and `Work.wait`,
note when they are called; that is all they do besides. `bench/studies/watch/cost.py` measures what that takes.

**Channels.** The messages of a group from one rank to another are numbered, in the order in which each of the two asks
for them: as gloo matches them, where tags are used alike on both sides. A channel is judged as a group of two.

**Who is late.** What counts is how long a rank's thread stood in `wait` for messages of the group, whichever: of two
neighbours the one that stands less is late, by the difference. In a balanced pipeline all stages stand equally long,
each at another place of its step; a late one stands less than all the others. Times are compared between moments that
both ranks know: a message has been handed over, and received.
"""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comms.bootstrap.compat import BackendWork, Work, group_members, wrap_method
from gradwire.comms.observe.stack import line_in_words
from gradwire.comms.watch.collective import IssuedCollective, channel_name, title_of
from gradwire.comms.watch.rank import QUIET_POINTS, GroupState, QuietPoint
from gradwire.compressors.callers import users_frame

KEPT = 256
"""Messages of a channel that are kept, to be compared."""

SPAN_SECONDS = 5.0
"""What the quiet points of a channel reach back, at least: statuses of two ranks are half a second apart."""

Line = tuple[str, int, str]
"""File, number, and function."""


@dataclass(slots=True)
class _Message:
    """One message, as this rank has asked for it.

    Attributes:
        channel: Which way.
        number: From 1.
        shape: Of its tensor.
        dtype: Of its tensor.
        line: That asked.
        began: When, by the clock of the day.
        ended: When a wait for it had ended; None before.
    """

    channel: "_Channel"
    number: int
    shape: torch.Size
    dtype: torch.dtype
    line: Line | None
    began: float
    ended: float | None = None


@dataclass(slots=True)
class _Waiting:
    """How long the threads of this rank have stood in `wait` for messages of one group."""

    seconds: float = 0.0


@dataclass(slots=True)
class _Channel:
    """The messages of a group from one rank to another, as one of the two sees them.

    Attributes:
        name: `default: 0 to 1`.
        ranks: Who sends, and who receives, in the default group.
        sends: This rank is the one that sends.
        waiting: Of its group.
        issued: Messages.
        ended: Sent ones that were handed over; received ones that were waited for.
        blocked: The message that a thread stands waiting for, and since when.
        quiet: Moments that the other rank knows, too.
        stride: Numbers of which quiet points are kept: multiples of it.
        last: Messages, newest last.
    """

    name: str
    ranks: tuple[int, int]
    sends: bool
    waiting: _Waiting
    issued: int = 0
    ended: int = 0
    blocked: tuple[int, float] | None = None
    quiet: deque[QuietPoint] = field(default_factory=lambda: deque(maxlen=QUIET_POINTS))
    stride: int = 1
    last: deque[_Message] = field(default_factory=lambda: deque(maxlen=KEPT))

    def passed(self, number: int, now: float) -> None:
        """Notes that a message was handed over, or has come."""
        self.ended = max(self.ended, number)
        if number % self.stride:
            return
        if len(self.quiet) == QUIET_POINTS and now - self.quiet[0].seconds < SPAN_SECONDS:
            self.stride *= 2  # both sides keep multiples, so what the one with more of them keeps the other has, too
            kept = [point for point in self.quiet if not point.number % self.stride]
            self.quiet.clear()
            self.quiet.extend(kept)
        self.quiet.append(QuietPoint(number, round(self.waiting.seconds, 4), round(now, 4)))

    def state(self, now: float) -> GroupState:
        """What this rank says of it."""
        blocked = self.blocked
        if blocked is None:
            return GroupState(self.issued, self.issued, 0.0, self.waiting.seconds, tuple(self.quiet))
        number, since = blocked
        return GroupState(self.issued, number - 1, now - since, self.waiting.seconds, tuple(self.quiet))


class MessageNotes:
    """Notes the messages of all process groups of this process, from `install` on."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, int, int], _Channel] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._open: dict[int, tuple[weakref.ref[BackendWork], _Message]] = {}
        self._world: dist.ProcessGroup | None = None
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Has torch's process groups tell of each message."""
        group = dist.ProcessGroup
        self._undo = [
            wrap_method(group, "send", partial(self._message, sends=True)),
            wrap_method(group, "recv", partial(self._message, sends=False)),
            wrap_method(Work, "wait", self._wait),
        ]

    def remove(self) -> None:
        """Leaves torch as it was."""
        while self._undo:
            self._undo.pop()()
        self._open.clear()

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Channel -> the rank that sends, and the one that receives."""
        return {channel.name: channel.ranks for channel in self._current()}

    def states(self) -> Iterator[tuple[str, GroupState]]:
        """Yields (channel, state)."""
        now = time.monotonic()
        for channel in self._current():
            yield channel.name, channel.state(now)

    def _current(self) -> list[_Channel]:
        """The channels of the default group that there is now."""
        return list(self._channels.values()) if self._world is dist.group.WORLD else []

    @property
    def waits(self) -> bool:
        """Whether a thread stands waiting for a message."""
        return any(channel.blocked is not None for channel in self._current())

    def issued(self) -> dict[str, list[IssuedCollective]]:
        """The last messages of each channel."""
        return {
            channel.name: [
                IssuedCollective(
                    each.number,
                    f"a message of {list(each.shape)} {str(each.dtype).removeprefix('torch.')}",
                    None if each.line is None else line_in_words(*each.line),
                    began=each.began,
                    ended=each.ended,
                )
                for each in list(channel.last)
            ]
            for channel in self._current()
        }

    def _message(
        self, ask: Callable[..., BackendWork], group: dist.ProcessGroup, *arguments: Any, sends: bool, **named: Any
    ) -> BackendWork:
        """Does what `send` or `recv` does, given (tensors, peer, tag), and notes it."""
        message = None if len(arguments) < 2 else self._begin(group, arguments[0], arguments[1], sends=sends)
        work = ask(group, *arguments, **named)
        if message is not None:
            key = id(work)
            self._open[key] = weakref.ref(work, lambda _: self._open.pop(key, None)), message
        return work

    def _begin(self, group: dist.ProcessGroup, tensors: list[Tensor], peer: int, *, sends: bool) -> _Message | None:
        channel = self._channel(group, group.rank(), peer, sends=sends)
        if channel is None:
            return None
        tensor = tensors[0]
        with self._lock:
            channel.issued += 1
            message = _Message(
                channel,
                channel.issued,
                tensor.shape,
                tensor.dtype,
                _users_line(),
                time.time(),
            )
            channel.last.append(message)
            if sends:
                channel.passed(message.number, time.monotonic())
        return message

    def _wait(self, wait: Callable[..., bool], work: BackendWork, *arguments: Any, **named: Any) -> bool:
        known = self._open.get(id(work))
        if known is None or known[0]() is not work:
            return wait(work, *arguments, **named)
        message, began = known[1], time.monotonic()
        channel = message.channel
        channel.blocked = message.number, began
        try:
            done = wait(work, *arguments, **named)
        finally:
            now = time.monotonic()
            with self._lock:
                channel.blocked = None
                channel.waiting.seconds += now - began
            self._open.pop(id(work), None)
        message.ended = time.time()
        if not channel.sends:
            with self._lock:
                channel.passed(message.number, now)
        return done

    def _channel(self, group: dist.ProcessGroup, rank: int, peer: int, *, sends: bool) -> _Channel | None:
        """That of a message; None of a group that torch.distributed does not know, as gradwire's own."""
        world = dist.group.WORLD
        if world is not self._world:  # another default group has taken the last one's place
            with self._lock:
                self._world, self._channels, self._waiting = world, {}, {}
        name = group.group_name
        key = (name, rank, peer) if sends else (name, peer, rank)
        channel = self._channels.get(key)
        if channel is None:
            members = group_members().get(name)
            if members is None:
                return None
            title = title_of(name, group.group_desc, "gloo")
            ranks = members[key[1]], members[key[2]]
            with self._lock:
                waiting = self._waiting.setdefault(title, _Waiting())
                channel = self._channels[key] = _Channel(channel_name(title, *ranks), ranks, sends, waiting)
        return channel


def _users_line() -> Line | None:
    frame = users_frame(sys._getframe(3))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
