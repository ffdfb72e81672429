"""Counters of executors: what each phase has sent, and how long it took."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradwire.comms.plan.rank_plans import PhasePart
from gradwire.comms.run.all_reduces import EndedAllReduce, RunningAllReduce
from gradwire.comms.streams import Clock, Mark

if TYPE_CHECKING:  # loaded where it is asked for
    from gradwire.comms.observe.recorder import Recorder


PhaseKey = tuple[int, str, str]
"""A phase's place, its collective, and its level."""


@dataclass(slots=True)
class PhaseTotals:
    """One phase of a plan, summed over all chunks of all buckets that went through it.

    Attributes:
        phase: Its place in the plan.
        op: The collective.
        level: Name of the level, or `all ranks`.
        calls: Collectives that this rank took part in.
        logical_nbytes: Bytes of gradient that this rank contributed to them.
        wire_nbytes: Bytes that this rank sent, headers not counted.
        seconds: From issuing a chunk's collectives to having their result, summed; phases of different chunks overlap.
            On CUDA by events, in the steps that are timed, and from those for all calls.
        timed_calls: Calls that `seconds` was measured for.
    """

    phase: int
    op: str
    level: str
    calls: int = 0
    logical_nbytes: int = 0
    wire_nbytes: float = 0.0
    seconds: float = 0.0
    timed_calls: int = 0

    def add(self, logical_nbytes: int, wire_nbytes: float) -> None:
        """Counts a collective: the bytes of gradient that this rank contributed, and those that it sent."""
        self.calls += 1
        self.logical_nbytes += logical_nbytes
        self.wire_nbytes += wire_nbytes


class PhaseStats:
    """Counts what is sent, phase by phase, with the times that it took. Any thread.

    Args:
        clock: Tells when phases begin and end.
        level_names: Of the cluster.

    Attributes:
        clock: See above.
        timing: Whether phases are timed from now on; on a CPU they always are.
        ended: On a CPU takes the launches that end; None, and nothing is kept.
        recorder: Notes what happens when, while a trace or a profiler is on; None otherwise.
        all_reduces: How many have been started.
    """

    def __init__(self, clock: Clock, level_names: Sequence[str]) -> None:
        self.clock = clock
        self.timing = True
        self.ended: list[EndedAllReduce] | None = None
        self.recorder: Recorder | None = None
        self.all_reduces = 0
        self._level_names = level_names
        self._rows: dict[PhaseKey, PhaseTotals] = {}
        self._issued: list[tuple[PhaseTotals, int, Mark, Mark]] = []
        """Phases of the step before this one, on CUDA, to be read: (row, calls, began, ended)."""
        self._being_issued: list[tuple[PhaseTotals, int, Mark, Mark]] = []
        self._lock = threading.Lock()

    def now(self) -> Mark | None:
        """The moment, where phases are timed; None otherwise."""
        return self.clock.now() if self.timing else None

    def add(self, index: int, op: str, level: str, logical_nbytes: int, wire_nbytes: float) -> None:
        """Counts a collective that belongs to no plan.

        Args:
            index: Its place in the report, behind the phases of plans.
            op: In words.
            level: Name of the level, or `all ranks`.
            logical_nbytes: Of gradient.
            wire_nbytes: That this rank sends.
        """
        with self._lock:
            row = self._rows.setdefault((index, op, level), PhaseTotals(index, op, level))
            row.add(logical_nbytes, wire_nbytes)

    def count(
        self, index: int, part: PhasePart, element_nbytes: int, began: Mark | None, sent_nbytes: float
    ) -> Mark | None:
        """Counts one chunk's way through a phase of its plan.

        Args:
            index: The phase's place in the plan.
            part: This rank's part in it.
            element_nbytes: Of the gradient.
            began: When it was issued; None where it is not timed.
            sent_nbytes: Bytes sent that the plan alone does not give.

        Returns:
            The moment at which the next phase begins; None where `began` is.
        """
        now = None if began is None else self.clock.now()
        phase = part.phase
        level = "all ranks" if phase.whole else self._level_names[phase.level]
        key = (index, phase.op, level)
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = PhaseTotals(*key)
            if isinstance(began, float) and isinstance(now, float):
                row.seconds += now - began
                row.timed_calls += part.shards
            elif began is not None and now is not None:
                self._being_issued.append((row, part.shards, began, now))
            row.calls += part.shards
            row.logical_nbytes += part.logical_numel * element_nbytes
            row.wire_nbytes += part.sent_numel * element_nbytes + sent_nbytes
        return now

    def note_end(self, run: RunningAllReduce, now: Mark) -> None:
        """Notes for reports and traces that a launch has ended, on a CPU.

        Args:
            run: The launch.
            now: The moment.
        """
        if self.recorder is not None:
            self.recorder.note_transfer(run, now)
        if self.ended is not None and run.all_reduce.counted:
            assert isinstance(run.began, float) and isinstance(now, float)  # by the host's clock
            self.ended.append(EndedAllReduce(run.rank_plan.plan, run.began, now))

    def totals(self) -> tuple[PhaseTotals, ...]:
        """What has travelled so far, in the order of the phases. On CUDA waits for what was issued."""
        for _ in range(2):
            self.read_times()
        with self._lock:
            return tuple(
                replace(row, seconds=row.seconds * row.calls / max(row.timed_calls, 1))
                for _, row in sorted(self._rows.items())
            )

    def phase_seconds(self) -> dict[PhaseKey, tuple[float, int, int]]:
        """The timed seconds and calls and the bytes of each phase so far, by its place, collective and level.

        On CUDA as far as they have been read. Waits for nothing.
        """
        with self._lock:
            return {key: (row.seconds, row.timed_calls, row.logical_nbytes) for key, row in self._rows.items()}

    def seconds_of_phases(self) -> list[float]:
        """The seconds that `phase_seconds` gives, in the same order, in a tenth of the time; phases come at its end."""
        with self._lock:
            return [row.seconds for row in self._rows.values()]

    def read_times(self) -> None:
        """Reads the times of the phases that were issued before the last call: the device has passed them (on CUDA)."""
        passed, self._issued, self._being_issued = self._issued, self._being_issued, []
        for row, calls, began, ended in passed:
            row.seconds += self.clock.between(began, ended)
            row.timed_calls += calls
