"""Counters of executors: what each phase has sent, and how long it took."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradwire.comms.plan.rank_plans import Chunk
from gradwire.comms.run.all_reduces import EndedAllReduce, RunningAllReduce
from gradwire.comms.streams import Clock, Mark

if TYPE_CHECKING:  # loaded where it is asked for
    from gradwire.comms.observe.recorder import Recorder


PhaseKey = tuple[int, str, str]
"""Index of a phase in its plan, its collective, and the name of its level."""


@dataclass(slots=True)
class PhaseTotals:
    """Totals of one phase of a plan over all chunks of all buckets.

    Attributes:
        phase: Index in the plan.
        op: Collective of the phase.
        level: Name of the level, or `all ranks`.
        calls: Collectives of this rank.
        logical_nbytes: Bytes of gradient that this rank contributed.
        wire_nbytes: Bytes that this rank sent, without headers.
        seconds: Time from issuing a chunk's collectives to their results, summed; phases of different chunks overlap.
            On CUDA measured by events in timed steps, and extrapolated to all calls.
        timed_calls: Number of calls in the measured part of `seconds`.
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
        """Counts one collective.

        Args:
            logical_nbytes: Bytes of gradient that this rank contributed.
            wire_nbytes: Bytes that it sent.
        """
        self.calls += 1
        self.logical_nbytes += logical_nbytes
        self.wire_nbytes += wire_nbytes


class PhaseStats:
    """Counts calls, bytes and seconds of each phase.

    Thread safety: all methods may be called from any thread, `read_times` and `totals` from one at a time. On CUDA one
    thread issues and reads, so `read_times` changes totals without the lock.

    Args:
        clock: Clock of the device: the host's on a CPU, events on CUDA.
        level_names: Names of the cluster's levels, innermost first.

    Attributes:
        clock: Clock of the device.
        timing: Whether phases are timed from now on; always on a CPU.
        ended: On a CPU, receives the all-reduces that end; None keeps none.
        recorder: Recorder of a trace or a profiler; None if neither is on.
        all_reduces: All-reduces of gradients started so far.
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
        """On CUDA, phases issued before the last `read_times`, whose times the next one reads: (totals, calls, began,
        ended)."""
        self._being_issued: list[tuple[PhaseTotals, int, Mark, Mark]] = []
        self._lock = threading.Lock()  # Guards _rows, the totals in it, and additions to _being_issued.

    def now(self) -> Mark | None:
        """Returns the present time, on CUDA an event on the current stream; None if phases are not timed now."""
        return self.clock.now() if self.timing else None

    def add(self, index: int, op: str, level: str, logical_nbytes: int, wire_nbytes: float) -> None:
        """Adds one call and its bytes to the totals of a collective that is no phase of a plan, such as a sparse sum's.

        Args:
            index: Number by which reports sort their rows; no phase counted by the same object has it.
            op: Name of the operation.
            level: Name of the level, or `all ranks`.
            logical_nbytes: Bytes of gradient that this rank contributes.
            wire_nbytes: Bytes that it sends.
        """
        with self._lock:
            row = self._rows.setdefault((index, op, level), PhaseTotals(index, op, level))
            row.add(logical_nbytes, wire_nbytes)

    def count(self, chunk: Chunk, element_nbytes: int, marks: Sequence[Mark], sent: Sequence[float]) -> None:
        """Adds the calls, bytes and seconds of one chunk to the totals of its phases.

        Called when the chunk has ended, on CUDA when its collectives have been issued; there `read_times` adds the
        seconds later.

        Args:
            chunk: The chunk, with this rank's part in each phase.
            element_nbytes: Bytes of one element of the gradient.
            marks: Begin of each phase, in order, and end of the last one, so one more than phases: seconds of the
                host's clock, on CUDA events. Empty if they were not timed.
            sent: Bytes that this rank has sent in each phase in addition to what the plan says: the payloads of a
                compressor; one number for each phase.
        """
        with self._lock:
            for index, (part, nbytes) in enumerate(zip(chunk.parts, sent, strict=True)):
                phase = part.phase
                key = (index, phase.op, "all ranks" if phase.whole else self._level_names[phase.level])
                row = self._rows.get(key)
                if row is None:
                    row = self._rows[key] = PhaseTotals(*key)
                began, ended = marks[index : index + 2] if marks else (None, None)
                if isinstance(began, float) and isinstance(ended, float):
                    row.seconds += ended - began
                    row.timed_calls += part.shards
                elif began is not None and ended is not None:
                    self._being_issued.append((row, part.shards, began, ended))
                row.calls += part.shards
                row.logical_nbytes += part.logical_numel * element_nbytes
                row.wire_nbytes += part.sent_numel * element_nbytes + nbytes

    def note_end(self, run: RunningAllReduce, now: Mark) -> None:
        """Records the end of an all-reduce for reports and traces, on a CPU.

        Args:
            run: The all-reduce.
            now: Time of its end.
        """
        if self.recorder is not None:
            self.recorder.note_all_reduce(run, now)
        if self.ended is not None and run.all_reduce.counted:
            assert isinstance(run.began, float) and isinstance(now, float)  # Times of the host's clock.
            self.ended.append(EndedAllReduce(run.rank_plan.plan, run.began, now))

    def totals(self) -> tuple[PhaseTotals, ...]:
        """Returns copies of the totals so far, by index of the phase.

        On CUDA the host waits for all timed phases, and the seconds of timed calls are extrapolated to all calls.
        """
        for _ in range(2):
            self.read_times()
        with self._lock:
            return tuple(
                replace(row, seconds=row.seconds * row.calls / max(row.timed_calls, 1))
                for _, row in sorted(self._rows.items())
            )

    def phase_seconds(self) -> dict[PhaseKey, tuple[float, int, int]]:
        """Returns phase -> (timed seconds, timed calls, bytes of gradient so far), without waiting.

        On CUDA only seconds and calls that `read_times` has read count.
        """
        with self._lock:
            return {key: (row.seconds, row.timed_calls, row.logical_nbytes) for key, row in self._rows.items()}

    def seconds_of_phases(self) -> list[float]:
        """Returns the timed seconds of each phase so far, in the order of `phase_seconds`; new phases come last."""
        with self._lock:
            return [row.seconds for row in self._rows.values()]

    def read_times(self) -> None:
        """Adds the seconds of phases issued before the previous call, on CUDA; does nothing on a CPU.

        Called once a step, so that the device has passed those phases; else the host waits for it.
        """
        passed, self._issued, self._being_issued = self._issued, self._being_issued, []
        for row, calls, began, ended in passed:
            row.seconds += self.clock.between(began, ended)
            row.timed_calls += calls
