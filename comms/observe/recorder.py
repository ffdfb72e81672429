"""Recorder of what one rank does and when, while a trace or a profiler is on. Without them there is no recorder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from gradwire.comms.streams import Clock, Mark

if TYPE_CHECKING:
    from gradwire.comms.run.all_reduces import RunningAllReduce

PREFIX = "gradwire: "
"""The prefix of the ranges that torch.profiler and Nsight Systems show."""

Detail = int | float | str | None | list[int] | list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """An interval on a track of the timeline.

    Attributes:
        track: Name of the track: `step`, `buckets`, `transfers`; a lane, `lane 0.1`, or on CUDA a phase with its index;
            of a watch, a group or channel.
        name: Text of the interval.
        began: Begin; on CUDA, a mark in the stream.
        ended: End; on CUDA, a mark in the stream.
        details: Further values, shown when the interval is selected.
    """

    track: str
    name: str
    began: Mark
    ended: Mark
    details: dict[str, Detail]


class Recorder:
    """Records intervals of one rank for a trace, and marks ranges for profilers.

    Thread safety: notes may be added from any thread.

    Args:
        clock: Clock with which the times of buckets are taken.
        keeps: True to keep notes for a trace.
        ranges: True to mark ranges for torch.profiler.
        nvtx: True to mark ranges for Nsight Systems.

    Attributes:
        notes: Intervals kept so far; empty without `keeps`.
        ranges: Whether ranges are marked for torch.profiler; may be changed between two steps.
        nvtx: Whether ranges are marked for Nsight Systems; may be changed between two steps.
    """

    def __init__(self, clock: Clock, *, keeps: bool, ranges: bool, nvtx: bool = False) -> None:
        self.notes: list[Note] = []
        self._clock = clock
        self._keeps = keeps
        self.ranges = ranges
        self.nvtx = nvtx

    def note(self, track: str, name: str, began: Mark, ended: Mark, **details: Detail) -> None:
        """Adds an interval that has ended to the trace; does nothing if no notes are kept (`keeps`).

        Args:
            track: Name of the row of the timeline; see `Note`.
            name: Text of the interval.
            began: Begin; on CUDA, a mark in the stream.
            ended: End; on CUDA, a mark in the stream.
            details: Further values, shown when the interval is selected.
        """
        if self._keeps:
            self.notes.append(Note(track, name, began, ended, details))

    def note_all_reduce(self, run: "RunningAllReduce", ended: Mark) -> None:
        """Adds the interval of an all-reduce that has succeeded, unless it was not timed or reports do not count it."""
        if run.all_reduce.counted and run.began is not None:
            buckets = [bucket.index for bucket in run.all_reduce.buckets]
            self.note(
                "transfers",
                f"transfer of bucket {', '.join(map(str, buckets))}",
                run.began,
                ended,
                launch=run.number,
                buckets=buckets,
                nbytes=run.flat.nbytes,
                plan=run.rank_plan.plan.name,
                compressor=next((phase.compressor for phase in run.rank_plan.plan.phases if phase.compressor), None),
            )

    @contextmanager
    def span(self, track: str, name: str, **details: Detail) -> Iterator[None]:
        """Adds the time that its body takes on this host as an interval of the trace, and marks it as a range.

        Args:
            track: Name of the row of the timeline; see `Note`.
            name: Text of the interval.
            details: Further values, shown when the interval is selected.
        """
        began = self._clock.now() if self._keeps else 0.0
        with self.host_range(name):
            yield
        if self._keeps:
            self.note(track, name, began, self._clock.now(), **details)

    @contextmanager
    def host_range(self, name: str) -> Iterator[None]:
        """Marks its body as a range for the profilers that are on."""
        with ExitStack() as ranges:
            if self.ranges:
                ranges.enter_context(record_function(PREFIX + name))
            if self.nvtx:
                ranges.enter_context(torch.cuda.nvtx.range(PREFIX + name))
            yield
