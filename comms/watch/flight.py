"""What torch's flight recorder knows of the collectives of all groups: how far each group is, and which line asked.

Torch's C++ records every collective of gloo and NCCL as it is issued, those of DDP's reducer and of FSDP2 too, in 1 to
2 us (gloo, torch 2.13, stacks of 3 and 30 frames). So nothing is wrapped, and nothing that is computed changes.
Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
"""

import itertools
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.comms.bootstrap.compat import flight_records, group_members
from gradwire.comms.observe.stack import TORCH, line_in_words
from gradwire.comms.watch.collective import IssuedCollective, title_of
from gradwire.comms.watch.names import WatchedModels
from gradwire.compressors.callers import is_users

UNEVEN = ("gather", "scatter", "all_to_all")
"""Operations whose inputs differ from rank to rank without a fault."""

PIPELINES = TORCH / "distributed" / "pipelining"
"""Torch's package in which ranks have different parts."""

ENDS = 1024
"""Latest ends of a group's collectives, as they were seen, that are kept for timelines."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank is in one group.

    Attributes:
        issued: Number of the last collective that was issued; they count from 1 in each group.
        ended: Number of the last one that has ended.
    """

    issued: int
    ended: int

    @property
    def waits(self) -> bool:
        """Whether something is under way."""
        return self.issued > self.ended


@dataclass(slots=True)
class _Still:
    """What a recorder has stated at one look after the other.

    Attributes:
        stated: Each time.
        looks: How often after the first time.
        next_check: After so many the collectives are asked, and after twice as many again. At the next look, where
            asking has helped in this group before: it may be quiet for no longer.
        ended: Up to this number all have ended, as they said themselves.
    """

    stated: Progress
    looks: int = 0
    next_check: int = 2
    ended: int = 0


class FlightReader:
    """Reads torch's flight recorders: gloo's, and NCCL's.

    A recorder numbers the groups of its own process, and says their names in its entries alone; so those are read once
    for each group. Groups that torch.distributed does not know, as gradwire's own, are left out.

    Attributes:
        members: Group -> its ranks in the default group, of the groups that have had a collective. Names are those that
            all ranks give them: `default`, `3 (mesh_shard)`, `default over nccl`.
    """

    def __init__(self) -> None:
        self.members: dict[str, tuple[int, ...]] = {}
        self._names: dict[tuple[str, str], str | None] = {}
        self._still: dict[tuple[str, str], _Still] = {}
        self._misstated: set[tuple[str, str]] = set()
        self._ends: dict[str, deque[tuple[int, float]]] = {}
        self._models = WatchedModels()

    def progress(self) -> dict[str, Progress]:
        """How far this rank is in each group."""
        found = {}
        for backend, record in flight_records(collectives=False, stacks=False).items():
            statuses = record.get("pg_status", {})
            if any((backend, number) not in self._names for number in statuses):
                self._learn()
            for number, status in statuses.items():
                name = self._names.get((backend, number))
                if name is not None:
                    issued, ended = status["last_enqueued_collective"], status["last_completed_collective"]
                    stated = Progress(max(int(issued), 0), max(int(ended), 0))
                    found[name] = self._checked((backend, number), stated)
                    self._note_end(name, found[name].ended)
        return found

    def look_for_models(self, seconds: float) -> None:
        """Looks for the models whose gradients are exchanged, now and then; returns at once.

        Args:
            seconds: Since this rank is watched.
        """
        if self.members:
            self._models.look(seconds)

    def _note_end(self, name: str, ended: int) -> None:
        ends = self._ends.setdefault(name, deque(maxlen=ENDS))
        if not ends or ends[-1][0] < ended:
            ends.append((ended, time.time()))

    def _end_of(self, name: str, number: int) -> float | None:
        """When a collective was first seen to have ended; None while it was not."""
        ends = self._ends.get(name, ())
        place = bisect_left(ends, number, key=lambda each: each[0])
        return ends[place][1] if place < len(ends) else None

    def _checked(self, key: tuple[str, str], stated: Progress) -> Progress:
        """What a recorder states, corrected: it names the one that has ended last, which need not be the latest one.

        gloo has two collectives of a group under way at a time, and the first may end last. So where nothing has
        changed for a while though something is said to be under way, each collective is asked.
        """
        still = self._still.get(key)
        if still is None or still.stated != stated:
            self._still[key] = _Still(stated, next_check=1 if key in self._misstated else 2)
            return stated
        if stated.waits and still.ended < stated.issued:
            still.looks += 1
            if still.looks == still.next_check:
                still.next_check *= 2
                still.ended = self._ended(key, stated)
                if still.ended > stated.ended:
                    self._misstated.add(key)
        return Progress(stated.issued, min(max(stated.ended, still.ended), stated.issued))

    def _ended(self, key: tuple[str, str], stated: Progress) -> int:
        """The number up to which all collectives of a group have ended, by what each says of itself."""
        backend, number = key
        entries = flight_records(collectives=True, stacks=False)[backend].get("entries", ())
        under_way = (
            int(each["collective_seq_id"])
            for each in entries
            if str(each["pg_id"]) == number and not each["is_p2p"] and not each["retired"]
        )
        return min(under_way, default=stated.issued + 1) - 1

    def issued(self, *, lines: bool = True) -> dict[str, list[IssuedCollective]]:
        """The last collectives of each group, in the order in which this rank has issued them.

        Args:
            lines: With the lines that issued them; without, it takes a tenth of the time.
        """
        found: dict[str, list[IssuedCollective]] = {}
        for backend, record in flight_records(collectives=True, stacks=lines).items():
            for entry in record.get("entries", ()):
                name = self._names.get((backend, str(entry["pg_id"])))
                if name is not None and not entry["is_p2p"]:
                    number, began = int(entry["collective_seq_id"]), entry["time_created_ns"] / 1e9
                    ended = self._end_of(name, number)
                    found.setdefault(name, []).append(
                        IssuedCollective(number, _what(entry), _line(entry), began, ended and max(ended, began))
                    )
        return {name: self._models.name(name, each) for name, each in found.items()}

    def _learn(self) -> None:
        """Finds out which groups the numbers stand for."""
        groups = group_members()
        for backend, record in flight_records(collectives=True, stacks=False).items():
            for entry in record.get("entries", ()):
                name, purpose = entry["process_group"]
                known = groups.get(name)
                title = None if known is None else title_of(name, purpose, backend)
                self._names[backend, str(entry["pg_id"])] = title
                if title is not None and known is not None:
                    self.members[title] = known


def _what(entry: dict[str, Any]) -> str:
    """`all_reduce of [1024] Float`."""
    operation = entry["profiling_name"].partition(":")[2]
    if not entry["input_sizes"] or operation in UNEVEN:
        return str(operation)
    sizes = ", ".join(str(size) for size in entry["input_sizes"])
    return f"{operation} of {sizes} {', '.join(dict.fromkeys(entry['input_dtypes']))}"


def _line(entry: dict[str, Any]) -> str | None:
    """The line that asked for a collective, to be shown and compared.

    That of the training script; of what torch's pipelines issue themselves (since 2.15) their own line, because each
    stage is called from a line of its own.
    """
    frames = entry.get("frames", ())
    inner = list(itertools.takewhile(lambda each: not is_users(each["filename"]), frames))
    frame = next((each for each in inner if Path(each["filename"]).is_relative_to(PIPELINES)), None)
    frame = frame or (frames[len(inner)] if len(inner) < len(frames) else frames[0] if frames else None)
    return None if frame is None else line_in_words(frame["filename"], frame["line"], frame["name"])
