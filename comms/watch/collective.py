"""Records of collectives and messages as one rank has issued them, and the names that ranks use for groups.

The point-to-point messages of a group from one rank to another form a *channel*. A channel is treated as a group of two
ranks with a name of its own, `default: 0 to 1`, and its messages are numbered by themselves.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TRACE_POLL_SECONDS = 0.002
"""Interval between two polls of the groups while a timeline is recorded: 1.5 % of a core, at 30 us each."""

_CHANNEL = re.compile(r"(?P<group>.*): (?P<source>\d+) to (?P<target>\d+)")


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """A collective, or a message of a channel, as one rank has issued it.

    Attributes:
        number: Number in its group or channel, from 1.
        what: Operation, shapes and dtypes as text, `all_reduce of [1024] Float`; equal on all ranks unless they
            disagree, because the operations whose inputs may differ are without shapes.
        line: Line of the training script that issued it, `train.py:88 in step`; None if the stack has no such line.
        began: Time at which it was issued, in seconds since the epoch by this host's clock.
        ended: Time at which it was first seen to have ended, or at which the wait for a message ended; None before.
        holds: Names of the gradients that it carries, `gradients of 1.bias to 1.weight`; None if they are not known.
    """

    number: int
    what: str
    line: str | None = None
    began: float = 0.0
    ended: float | None = None
    holds: str | None = None

    def __str__(self) -> str:
        return self.what + (f", {self.holds}" if self.holds else "")


@dataclass(frozen=True, slots=True)
class MessageCount:
    """Point-to-point messages of one group on this rank, sent and received ones together.

    Attributes:
        begun: Calls of `send` and `recv` that have begun.
        done: Calls that have returned, so that torch has counted the message.
        blocked: True if a thread waits for a message of this group whose sender is known.
    """

    begun: int = 0
    done: int = 0
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class TimelinePart:
    """Times of the last collectives and messages of one rank.

    Attributes:
        request: Number of the request to which this is the response.
        seconds: Time of the response, in seconds since the epoch by this host's clock.
        groups: Group or channel -> its collectives or messages, ascending.
    """

    request: int
    seconds: float
    groups: Mapping[str, Sequence[IssuedCollective]]


def title_of(name: str, purpose: str, backend: str) -> str:
    """Returns the name that ranks use for a group: `default`, `3 (mesh_shard)`, `default over nccl`.

    Args:
        name: Name that torch gives the group.
        purpose: Description that torch gives the group.
        backend: `gloo` or `nccl`.
    """
    title = "default" if purpose == "default_pg" else name
    if purpose not in ("default_pg", "undefined", ""):
        title += f" ({purpose})"
    return title if backend == "gloo" else f"{title} over {backend}"


def channel_name(group: str, source: int, target: int) -> str:
    """Returns the name of a channel, `default: 0 to 1`."""
    return f"{group}: {source} to {target}"


def sender_of(name: str) -> int | None:
    """Returns the rank that sends in a channel; None if `name` is that of a group."""
    found = _CHANNEL.fullmatch(name)
    return None if found is None else int(found["source"])


def in_words(name: str) -> str:
    """Returns `group default` for a group, `messages from 0 to 1 of group default` for a channel."""
    found = _CHANNEL.fullmatch(name)
    if found is None:
        return f"group {name}"
    return f"messages from {found['source']} to {found['target']} of group {found['group']}"


def one_in_words(name: str, number: int) -> str:
    """Returns the name of one collective, `collective 7 of group default`, or of one message of a channel.

    Args:
        name: Name of the group or channel.
        number: Number of the collective or message in it, from 1.
    """
    words = in_words(name)
    return (
        f"message {number}{words.removeprefix('messages')}"
        if sender_of(name) is not None
        else f"collective {number} of {words}"
    )
