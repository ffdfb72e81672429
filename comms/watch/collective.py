"""A collective or a message as one rank has issued it, and what ranks call the groups they are in."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TRACE_LOOK_SECONDS = 0.002
"""Seconds between two looks where a timeline is wanted: 1.5 % of a core, at 30 us each."""

_CHANNEL = re.compile(r"(?P<group>.*): (?P<source>\d+) to (?P<target>\d+)")


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One collective, as one rank has issued it.

    Attributes:
        number: Its number in its group.
        what: Operation, shapes and dtypes, in words; equal on all ranks unless they disagree.
        line: The line of the training script that issued it; None where the stack names none.
        began: When it was issued, in seconds of this host's clock of the day.
        ended: When it was first seen to have ended; None while it is under way.
        holds: Whose gradients or weights it carries, where that is known.
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
class TimelinePart:
    """What one rank tells of its last collectives.

    Attributes:
        request: That it responses.
        seconds: When, by its clock of the day.
        groups: Name -> collectives, ascending.
    """

    request: int
    seconds: float
    groups: Mapping[str, Sequence[IssuedCollective]]


def title_of(name: str, purpose: str, backend: str) -> str:
    """What ranks call a group: `default`, `3 (mesh_shard)`, `default over nccl`.

    Args:
        name: Torch's.
        purpose: What torch calls its description.
        backend: `gloo`, `nccl`.
    """
    title = "default" if purpose == "default_pg" else name
    if purpose not in ("default_pg", "undefined", ""):
        title += f" ({purpose})"
    return title if backend == "gloo" else f"{title} over {backend}"


def channel_name(group: str, source: int, target: int) -> str:
    """What ranks call the point-to-point messages of a group from one rank to another: `default: 0 to 1`."""
    return f"{group}: {source} to {target}"


def sender_of(name: str) -> int | None:
    """Who sends the messages of this name; None where it is that of a group."""
    found = _CHANNEL.fullmatch(name)
    return None if found is None else int(found["source"])


def in_words(name: str) -> str:
    """`group default`; `messages from 0 to 1 of group default`."""
    found = _CHANNEL.fullmatch(name)
    if found is None:
        return f"group {name}"
    return f"messages from {found['source']} to {found['target']} of group {found['group']}"


def one_in_words(name: str, number: int) -> str:
    """`collective 7 of group default`; `message 7 from 0 to 1 of group default`."""
    words = in_words(name)
    return (
        f"message {number}{words.removeprefix('messages')}"
        if sender_of(name) is not None
        else f"collective {number} of {words}"
    )
