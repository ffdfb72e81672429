"""Notes of point-to-point messages, as pipelines send them: which message was not sent, and which rank waits for it.

Torch's flight recorder does not record gloo's messages. So while a watch runs, `ProcessGroup.send` and `recv`, and
`Work.wait`, note their calls; nothing else is changed. `bench/studies/watch/cost.py` measures the cost.

**Channels.** The messages of a group from one rank to another form a channel. They are numbered in the order in which
each of the two ranks issues them, which is how gloo matches them if both sides use the same tags. A channel is
diagnosed like a group of two ranks.

**Stragglers.** The measure is how long a rank's threads were in `wait` for messages of the group, in any channel: of
two neighbours, the one that waited less is behind, by the difference. In a balanced pipeline all stages wait equally
long, each at another place of its step; a straggler waits less than all others. Times are compared between moments that
both ranks know: a message was sent, and received.
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
from gradwire.comms.watch.collective import IssuedCollective, MessageCount, channel_name, title_of
from gradwire.comms.watch.rank import END_POINTS, EndPoint, GroupState
from gradwire.compressors.callers import users_frame

KEPT = 256
"""Number of messages of a channel that are kept for comparisons between ranks."""

SPAN_SECONDS = 5.0
"""Least time that the end points of a channel cover: statuses of two ranks may be published half a second apart, and
one may be missed."""

Line = tuple[str, int, str]
"""File, line number and function."""


@dataclass(slots=True)
class _Message:
    """A message as this rank has issued it, whether it sends or receives.

    Attributes:
        channel: Channel of the message.
        number: Number in the channel, from 1.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        line: Line of the training script that issued it; None if the stack has no such line.
        began: Time of issue, in seconds since the epoch.
        ended: Time at which a wait for it ended; None before.
    """

    channel: "_Channel"
    number: int
    shape: torch.Size
    dtype: torch.dtype
    line: Line | None
    began: float
    ended: float | None = None


@dataclass(slots=True)
class _Group:
    """Messages of one group on this rank, in all channels.

    Attributes:
        waited: Seconds that threads were in `wait` for them.
        begun: Calls of `send` and `recv` that have begun.
        done: Calls that have returned.
    """

    waited: float = 0.0
    begun: int = 0
    done: int = 0


@dataclass(slots=True)
class _Channel:
    """The messages of a group from one rank to another, as one of the two ranks sees them.

    Attributes:
        name: `default: 0 to 1`.
        ranks: Sender and receiver, by their ranks in the default group.
        sends: True if this rank is the sender.
        group: Group of the channel.
        issued: Number of the last message that was issued.
        ended: Number of the last message that was sent (sender) or waited for (receiver).
        blocked: Number of the message for which a thread waits, and the monotonic time since when; None without one.
        ends: Moments that both ranks know; see `EndPoint`.
        stride: Interval of the numbers of the end points that are kept. Both ranks keep multiples of a power of two,
            so that one has all points that the other one keeps with a larger stride.
        last: Messages, newest last.
    """

    name: str
    ranks: tuple[int, int]
    sends: bool
    group: _Group
    issued: int = 0
    ended: int = 0
    blocked: tuple[int, float] | None = None
    ends: deque[EndPoint] = field(default_factory=lambda: deque(maxlen=END_POINTS))
    stride: int = 1
    last: deque[_Message] = field(default_factory=lambda: deque(maxlen=KEPT))

    def passed(self, number: int, now: float) -> None:
        """Records that the message with this number was sent, or received, at monotonic time `now`.

        It becomes an end point if its number is a multiple of `stride`, which is doubled first if the points kept would
        cover less than `SPAN_SECONDS`.
        """
        self.ended = max(self.ended, number)
        if number % self.stride:
            return
        # Thin the points out if they would cover less than the time in which a status may be missed.
        if len(self.ends) == END_POINTS and now - self.ends[0].seconds < SPAN_SECONDS:
            self.stride *= 2
            kept = [point for point in self.ends if not point.number % self.stride]
            self.ends.clear()
            self.ends.extend(kept)
        self.ends.append(EndPoint(number, round(self.group.waited, 4), round(now, 4)))

    def state(self, now: float) -> GroupState:
        """Returns the state of the channel on this rank at monotonic time `now`.

        While no thread waits for one of its messages, all that were issued count as ended.
        """
        blocked = self.blocked
        if blocked is None:
            return GroupState(self.issued, self.issued, 0.0, self.group.waited, tuple(self.ends))
        number, since = blocked
        return GroupState(self.issued, number - 1, now - since, self.group.waited, tuple(self.ends))


class MessageNotes:
    """Notes the point-to-point messages of all process groups of this process, from `install` on.

    Thread safety: messages may be issued and waited for in any thread, and be read in another one.
    """

    def __init__(self) -> None:
        self._channels: dict[tuple[str, int, int], _Channel] = {}
        self._groups: dict[str, _Group] = {}
        self._open: dict[int, tuple[weakref.ref[BackendWork], _Message]] = {}
        """Work's `id` -> the work and its message, until it was waited for or collected."""
        self._world: dist.ProcessGroup | None = None
        self._lock = threading.Lock()
        """Guards `_channels`, `_groups`, `_world`, and the counters and points of each channel and group."""
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Wraps torch's `ProcessGroup.send`, `recv`, `recv_anysource` and `Work.wait`, for every group."""
        group = dist.ProcessGroup
        self._undo = [
            wrap_method(group, "send", partial(self._message, sends=True)),
            wrap_method(group, "recv", partial(self._message, sends=False)),
            wrap_method(group, "recv_anysource", self._anysource),
            wrap_method(Work, "wait", self._wait),
        ]

    def remove(self) -> None:
        """Restores torch's own methods that `install` has wrapped, and forgets messages that are not waited for yet."""
        while self._undo:
            self._undo.pop()()
        self._open.clear()

    def counts(self) -> dict[str, MessageCount]:
        """Returns group -> its messages on this rank, by torch's names of the groups.

        Empty if the default group is another one than at the last message.
        """
        with self._lock:
            if self._world is not dist.group.WORLD:
                return {}
            blocked = {name for (name, _, _), channel in self._channels.items() if channel.blocked is not None}
            return {name: MessageCount(each.begun, each.done, name in blocked) for name, each in self._groups.items()}

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Channel -> sender and receiver, by their ranks in the default group."""
        return {channel.name: channel.ranks for channel in self._current()}

    def states(self) -> Iterator[tuple[str, GroupState]]:
        """Yields (channel, its state on this rank)."""
        now = time.monotonic()
        for channel in self._current():
            yield channel.name, channel.state(now)

    def _current(self) -> list[_Channel]:
        """Returns the channels of the present default group."""
        return list(self._channels.values()) if self._world is dist.group.WORLD else []

    @property
    def waits(self) -> bool:
        """True if a thread waits for a message."""
        return any(channel.blocked is not None for channel in self._current())

    def issued(self) -> dict[str, list[IssuedCollective]]:
        """Returns channel -> its last messages, ascending."""
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
        self, issue: Callable[..., BackendWork], group: dist.ProcessGroup, *arguments: Any, sends: bool, **named: Any
    ) -> BackendWork:
        """Issues `send` or `recv` with its arguments (tensors, peer, tag), and notes it; returns torch's work.

        Not noted is a message whose peer is given by keyword, or whose group torch.distributed does not know.
        """
        channel = None if len(arguments) < 2 else self._channel(group, group.rank(), arguments[1], sends=sends)
        if channel is None:
            return issue(group, *arguments, **named)
        message = self._begin(channel, arguments[0][0])
        work = self._issue(channel.group, issue, group, *arguments, **named)
        key = id(work)
        self._open[key] = weakref.ref(work, lambda _: self._open.pop(key, None)), message
        return work

    def _anysource(
        self, issue: Callable[..., BackendWork], group: dist.ProcessGroup, *arguments: Any, **named: Any
    ) -> BackendWork:
        """Issues `recv_anysource`, which has no channel, and counts it among the messages of its group."""
        with self._lock:
            self._renew()
            counted = self._groups.setdefault(group.group_name, _Group())
            counted.begun += 1
        return self._issue(counted, issue, group, *arguments, **named)

    def _issue(self, counted: _Group, issue: Callable[..., BackendWork], *arguments: Any, **named: Any) -> BackendWork:
        """Issues a message that has been counted as begun; counts it as done, or no longer as begun if that raises."""
        try:
            work = issue(*arguments, **named)
        except BaseException:
            with self._lock:
                counted.begun -= 1
            raise
        with self._lock:
            counted.done += 1
        return work

    def _begin(self, channel: _Channel, tensor: Tensor) -> _Message:
        """Counts a message of a channel as issued, adds a note of it to the channel's last ones, and returns the note.

        A message that this rank sends counts as passed at once.

        Args:
            channel: Channel of the message.
            tensor: Tensor that is sent or filled; its shape and dtype are noted.
        """
        with self._lock:
            channel.group.begun += 1
            channel.issued += 1
            message = _Message(channel, channel.issued, tensor.shape, tensor.dtype, _users_line(), time.time())
            channel.last.append(message)
            if channel.sends:
                channel.passed(message.number, time.monotonic())
        return message

    def _wait(self, wait: Callable[..., bool], work: BackendWork, *arguments: Any, **named: Any) -> bool:
        """Waits for a work; if it is a message, notes that and for how long a thread waits, and its receipt."""
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
                channel.group.waited += now - began
            self._open.pop(id(work), None)
        message.ended = time.time()
        if not channel.sends:
            with self._lock:
                channel.passed(message.number, now)
        return done

    def _renew(self) -> None:
        """Forgets the messages of an earlier default group. Called under the lock."""
        world = dist.group.WORLD
        if world is not self._world:
            self._world, self._channels, self._groups = world, {}, {}

    def _channel(self, group: dist.ProcessGroup, rank: int, peer: int, *, sends: bool) -> _Channel | None:
        """Returns the channel of a message; None for a group that torch.distributed does not know.

        Args:
            group: Group of the message.
            rank: This rank in the group.
            peer: The other rank in the group.
            sends: Whether this rank is the sender.
        """
        if dist.group.WORLD is not self._world:
            with self._lock:
                self._renew()
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
                counted = self._groups.setdefault(name, _Group())
                channel = self._channels[key] = _Channel(channel_name(title, *ranks), ranks, sends, counted)
        return channel


def _users_line() -> Line | None:
    frame = users_frame(sys._getframe(3))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
