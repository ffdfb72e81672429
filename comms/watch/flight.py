"""Reader of torch's flight recorder: how far each group is, which collectives it had last, and which line issued them.

Torch's C++ records every collective of gloo and NCCL when it is issued, those of DDP's reducer and of FSDP2 included,
in 1 to 2 us (gloo, torch 2.13, stacks of 3 and 30 frames). So nothing is wrapped, and nothing that is computed changes.
Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.

**Numbers.** The recorder's state of a gloo group counts operations: collectives and point-to-point messages. Two ranks
of a group send different numbers of messages, so operations of the same number are different ones. The reader therefore
subtracts the messages of this rank, which `MessageNotes` counts: in all that it returns, collectives are numbered from
1 without messages, as in the recorder's entries.
"""

import importlib
import itertools
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gradwire.comms.bootstrap.compat import flight_records, group_members
from gradwire.comms.observe.stack import TORCH, line_in_words
from gradwire.comms.watch.collective import IssuedCollective, MessageCount, title_of
from gradwire.comms.watch.names import WatchedModels
from gradwire.compressors.callers import is_users

UNEVEN = ("gather", "scatter", "all_to_all")
"""Operations whose inputs may differ from rank to rank without a fault."""

PIPELINES = TORCH / "distributed" / "pipelining"
"""Torch's package for pipelines, in which each rank runs a different stage."""

ENDS = 1024
"""Number of observed ends that are kept of each group, for timelines."""

NO_MESSAGES = MessageCount()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank in one group.

    Attributes:
        issued: Number of the last collective that was issued, from 1; messages do not count.
        ended: Number of the last collective up to which all have ended.
    """

    issued: int
    ended: int

    @property
    def waits(self) -> bool:
        """True if a collective is in flight."""
        return self.issued > self.ended


@dataclass(slots=True)
class _Group:
    """A group that the recorder numbers.

    Attributes:
        title: Name that all ranks use for it; None if torch.distributed does not know it, as gradwire's own groups.
        name: Torch's name, by which messages are counted.
        uncounted: Number of messages that were issued before this rank began to count them.
        progress: Progress at the last poll, after corrections.
        stated: Progress by the recorder's state of the group at the last poll, before corrections; None before one.
        polls: Number of polls in which `stated` has not changed.
        next_check: Value of `polls` at which the entries are read; doubled each time.
        checked: Number up to which all collectives have ended by their entries; 0 if they were not read since `stated`
            has changed.
        misstated: True if reading the entries has corrected `stated` of this group before.
        ends: (number of the last collective that had ended, time of the poll in seconds since the epoch), ascending.
    """

    title: str | None
    name: str
    uncounted: int = 0
    progress: Progress = Progress(0, 0)
    stated: Progress | None = None
    polls: int = 0
    next_check: int = 2
    checked: int = 0
    misstated: bool = False
    ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ENDS))

    def end_of(self, number: int) -> float | None:
        """Returns when the collective with this number was first seen to have ended; None while it is in flight.

        The time is in seconds since the epoch.
        """
        place = bisect_left(self.ends, number, key=lambda each: each[0])
        return self.ends[place][1] if place < len(self.ends) else None


class FlightReader:
    """Reads torch's flight recorders, gloo's and NCCL's.

    The recorder numbers the groups of its own process, and names them only in its entries. So the entries are read once
    for each new group. Groups that torch.distributed does not know, as gradwire's own, are left out.

    Thread safety: none. One thread polls; `issued` is called under the lock of `Session`.

    Args:
        messages: Function that returns torch's name of a group -> its messages on this rank.

    Attributes:
        members: Group -> its ranks in the default group, of the groups of which the recorder had an entry. Names are
            equal on all ranks: `default`, `3 (mesh_shard)`, `default over nccl`.
    """

    def __init__(self, messages: Callable[[], Mapping[str, MessageCount]] = dict) -> None:
        self.members: dict[str, tuple[int, ...]] = {}
        self._messages = messages
        self._known: dict[tuple[str, str], _Group] = {}
        self._models = WatchedModels()
        self._began = time.monotonic()

    def progress(self) -> dict[str, Progress]:
        """Reads how far this rank is in each group: group -> progress."""
        found = {}
        before = self._messages()
        records = flight_records(collectives=False, stacks=False)
        after = self._messages()
        for backend, record in records.items():
            statuses = record.get("pg_status", {})
            if any((backend, number) not in self._known for number in statuses):
                self._learn()
            for number, status in statuses.items():
                known = self._known.get((backend, number))
                if known is None or known.title is None:
                    continue
                counted = before.get(known.name, NO_MESSAGES)
                # A message that is just being issued may be in one of the two counts alone: read it at the next poll.
                if backend != "gloo" or after.get(known.name, NO_MESSAGES).begun == counted.done:
                    messages = known.uncounted + counted.done if backend == "gloo" else 0
                    issued, ended = status["last_enqueued_collective"], status["last_completed_collective"]
                    stated = _collectives(max(int(issued), 0), max(int(ended), 0), messages, counted, known.progress)
                    known.progress = self._checked(known, (backend, number), stated, always=messages > 0)
                    if not known.ends or known.ends[-1][0] < known.progress.ended:
                        known.ends.append((known.progress.ended, time.time()))
                found[known.title] = known.progress
        return found

    def search_models(self) -> None:
        """Starts a search for the models whose gradients are exchanged, if one is due; returns at once."""
        if self.members:
            self._models.search(time.monotonic() - self._began)

    def _checked(self, group: _Group, key: tuple[str, str], stated: Progress, *, always: bool) -> Progress:
        """Returns the progress of a group, corrected by the state of each entry of the recorder.

        The recorder's state of a group names the collective that ended last, which need not be the newest one.

        gloo runs two collectives of a group at a time, and the first one may end last. So if the statement stays the
        same for some polls while something seems to be in flight, the state of each entry is read.

        Args:
            group: The group.
            key: Backend and number of the group.
            stated: Progress by the recorder's state of the group.
            always: True to read the entries at the first poll without a change of `stated`; False at the second one,
                unless the state of this group was wrong before (`misstated`).
        """
        if group.stated != stated:
            group.stated, group.polls, group.checked = stated, 0, 0
            group.next_check = 1 if always or group.misstated else 2
            return stated
        if stated.waits and group.checked < stated.issued:
            group.polls += 1
            if group.polls == group.next_check:
                group.next_check *= 2
                group.checked = self._ended(key, stated)
                group.misstated |= group.checked > stated.ended
        return Progress(stated.issued, min(max(stated.ended, group.checked), stated.issued))

    def _ended(self, key: tuple[str, str], stated: Progress) -> int:
        """Reads the recorder's entries, and returns the number up to which all collectives of a group have ended."""
        backend, number = key
        entries = flight_records(collectives=True, stacks=False)[backend].get("entries", ())
        in_flight = (
            int(each["collective_seq_id"])
            for each in entries
            if str(each["pg_id"]) == number and not each["is_p2p"] and not each["retired"]
        )
        return min(in_flight, default=stated.issued + 1) - 1

    def issued(self, *, lines: bool = True) -> dict[str, list[IssuedCollective]]:
        """Reads the last collectives of each group, in the order in which this rank has issued them.

        They have the names of the gradients that they carry, as far as those are known.

        Args:
            lines: True to include the lines that issued them; without, it takes a tenth of the time.
        """
        found: dict[str, list[IssuedCollective]] = {}
        with without_compiler():
            records = flight_records(collectives=True, stacks=lines)
        for backend, record in records.items():
            for entry in record.get("entries", ()):
                known = self._known.get((backend, str(entry["pg_id"])))
                if known is not None and known.title is not None and not entry["is_p2p"]:
                    number, began = int(entry["collective_seq_id"]), entry["time_created_ns"] / 1e9
                    ended = known.end_of(number)
                    found.setdefault(known.title, []).append(
                        IssuedCollective(number, _what(entry), _line(entry), began, ended and max(ended, began))
                    )
        return {name: self._models.name(name, each) for name, each in found.items()}

    def _learn(self) -> None:
        """Reads the names of the groups that the recorder knows by number only, and adds them to `members`.

        Also finds out how many messages of each group were issued before this process began to count them.
        """
        groups, counts = group_members(), self._messages()
        for backend, record in flight_records(collectives=True, stacks=False).items():
            newest: dict[str, int] = {}
            for entry in record.get("entries", ()):
                number, (name, purpose) = str(entry["pg_id"]), entry["process_group"]
                if not entry["is_p2p"]:
                    newest[number] = max(newest.get(number, 0), int(entry["collective_seq_id"]))
                if (backend, number) not in self._known:
                    ranks = groups.get(name)
                    title = None if ranks is None else title_of(name, purpose, backend)
                    self._known[backend, number] = _Group(title, name)
                    if title is not None and ranks is not None:
                        self.members[title] = ranks
            # Messages from before this process counted them: of all operations those that are neither.
            for number, collectives in newest.items():
                known, status = self._known[backend, number], record.get("pg_status", {}).get(number)
                counted = counts.get(known.name, NO_MESSAGES)
                if status is not None and known.progress.issued == 0 and counted.begun == counted.done:
                    uncounted = int(status["last_enqueued_collective"]) - collectives - counted.done
                    known.uncounted = max(uncounted, 0)


def _collectives(issued: int, ended: int, messages: int, counted: MessageCount, previous: Progress) -> Progress:
    """Returns the progress of a group in collectives, from the recorder's state, which also counts messages.

    `ended` of the result is a lower bound while something is in flight: the recorder does not tell which of the ended
    operations were messages, so all messages are subtracted.

    Args:
        issued: Number of operations that were issued: collectives and messages.
        ended: Number of the operation that ended last.
        messages: Number of messages among those issued.
        counted: Messages of the group as this rank has counted them.
        previous: Progress at the last poll, below which the result does not fall.
    """
    if not messages:
        return Progress(issued, ended)
    collectives = max(issued - messages, previous.issued)
    if ended >= issued or counted.blocked:
        # Everything has ended, or the thread waits for a message: synchronous collectives before it have ended.
        return Progress(collectives, collectives)
    # Which of the operations up to `ended` were messages is not known: at most all of them.
    return Progress(collectives, min(max(ended - messages, previous.ended), collectives))


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keeps torch from importing its compiler while stacks are read.

    For each Python stack, torch's C++ looks for code that `torch._inductor` has generated, and by that imports the
    package: 800 modules, 2 to 10 s, in which the rank does not respond. If it was not imported before, no such code
    exists. So an empty module stands in its place meanwhile; to other threads it passes on the real one.
    Source: torch/csrc/profiler/python/combined_traceback.cpp (torch 2.13).
    """
    name = "torch._inductor"
    if name in sys.modules:
        yield
        return
    reader, stand_in = threading.get_ident(), ModuleType(name)

    def attribute(wanted: str) -> Any:
        if threading.get_ident() == reader:
            raise AttributeError(wanted)
        return getattr(importlib.import_module(name), wanted)

    stand_in.__getattr__ = attribute  # type: ignore[method-assign]
    torch._inductor = stand_in
    try:
        yield
    finally:
        # Another thread may have imported the real one meanwhile.
        if torch.__dict__.get("_inductor") is stand_in:
            del torch._inductor


def _what(entry: dict[str, Any]) -> str:
    """Returns operation, shapes and dtypes: `all_reduce of [1024] Float`."""
    operation = entry["profiling_name"].partition(":")[2]
    if not entry["input_sizes"] or operation in UNEVEN:
        return str(operation)
    sizes = ", ".join(str(size) for size in entry["input_sizes"])
    return f"{operation} of {sizes} {', '.join(dict.fromkeys(entry['input_dtypes']))}"


def _line(entry: dict[str, Any]) -> str | None:
    """Returns the line that issued a collective; None if there is no stack.

    It is the innermost line of the training script. For what torch's pipelines issue themselves (since 2.15) it is the
    line in the pipeline's code, because the script calls each stage from a different line.
    """
    frames = entry.get("frames", ())
    inner = list(itertools.takewhile(lambda each: not is_users(each["filename"]), frames))
    frame = next((each for each in inner if Path(each["filename"]).is_relative_to(PIPELINES)), None)
    frame = frame or (frames[len(inner)] if len(inner) < len(frames) else frames[0] if frames else None)
    return None if frame is None else line_in_words(frame["filename"], frame["line"], frame["name"])
