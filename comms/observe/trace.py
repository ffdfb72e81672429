"""Trace of some steps of all ranks in one file, for https://ui.perfetto.dev, chrome://tracing and `gradwire plot`.

**Clocks.** Each rank takes times by its own clock. Before and after the steps of a trace, all ranks run `ROUNDS` tiny
all-reduces, and note when they entered and left each one. No rank leaves before all have entered. So if d is the
difference of rank r's clock from rank 0's, entered(r) - left(0) <= d <= left(r) - entered(0) in every round. The
fastest round gives the tightest bounds; d is set to their middle, and is wrong by at most half of their distance, which
the file states. This is Cristian's algorithm with the least round trip, for all pairs at a time. Between the two
measurements, d is taken to change linearly, as clocks of different speed do. Source: F. Cristian, Probabilistic clock
synchronization, Distributed Computing 3 (1989).

**Files.** Google's Trace Event Format: a process for each rank, a thread for each of its tracks, complete events
(`"ph": "X"`) in microseconds. Intervals that overlap in one track, as buckets do, are spread over several threads.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.comms.boundary.files import replace_text
from gradwire.comms.boundary.messages import MessageType
from gradwire.comms.communicator import Communicator
from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.observe.recorder import Note, Recorder
from gradwire.comms.report import bucket_words
from gradwire.comms.run.all_reduces import AllReduce, Bucket
from gradwire.comms.streams import Mark

log = logging.getLogger("gradwire")

ROUNDS = 16
"""Rounds in which clocks are compared; the fastest one counts. A round takes 0.3 ms."""

MOST_NBYTES = 256 << 20
"""Most bytes of the notes of all ranks together. If there are more, those of the last ranks are left out."""

KIND = "gradwire trace"
"""Kind of the file, in its `otherData`."""

STEP, BUCKETS, TRANSFERS = "step", "buckets", "transfers"

Round = tuple[float, float]
"""Times at which a rank entered and left an all-reduce, by its own clock."""
Contents = Mapping[int, tuple[int, tuple[str, ...]]]
"""Bucket -> (elements, names of its parameters)."""
Event = dict[str, object]


@dataclass(frozen=True, slots=True)
class Offset:
    """Offset of a rank's clock from rank 0's.

    Attributes:
        seconds: Time by which the rank's clock is ahead.
        error_seconds: Largest possible error of `seconds`.
        at: Time of the measurement, by the rank's own clock.
    """

    seconds: float
    error_seconds: float
    at: float


def offset(first: Sequence[Round], other: Sequence[Round]) -> Offset:
    """Returns the offset of a rank's clock, from rounds of both ranks, by the rule in the module's header.

    Args:
        first: Rounds of the reference rank.
        other: The same rounds of the other rank.
    """
    low = max(mine[0] - theirs[1] for mine, theirs in zip(other, first, strict=True))
    high = min(mine[1] - theirs[0] for mine, theirs in zip(other, first, strict=True))
    return Offset((low + high) / 2, (high - low) / 2, other[-1][1])


def aligned(seconds: float, before: Offset, after: Offset) -> float:
    """Converts a time of a rank's clock to rank 0's clock, by linear interpolation between two measured offsets.

    Args:
        seconds: Time by the rank's clock.
        before: Offset of the rank's clock to rank 0's, measured before the trace.
        after: The same offset, measured after the trace.
    """
    share = 0.0 if after.at == before.at else (seconds - before.at) / (after.at - before.at)
    return seconds - before.seconds - share * (after.seconds - before.seconds)


def clock_rounds(communicator: Communicator) -> list[Round] | None:
    """Runs the rounds in which clocks are compared, on all ranks together; None if the group has failed."""
    rounds = []
    for _ in range(ROUNDS):
        entered = time.perf_counter()
        if NumberExchange(communicator, [0.0]).read() is None:
            return None
        rounds.append((entered, time.perf_counter()))
    return rounds


_NOTES: MessageType[tuple[tuple[str, str, float, float, dict[str, Any]], ...]] = MessageType(
    tuple[tuple[str, str, float, float, dict[str, object]], ...], most_nbytes=1 << 30
)
"""Notes of a rank: the fields of `Note`, in order."""


class Trace:
    """Trace of one rank. All ranks make one between the same two steps, which blocks while their clocks are compared.

    Args:
        communicator: Communicator whose launches are traced.
        file: File that rank 0 writes.
        steps: Number of steps to trace.
        contents: Contents of each bucket.
        phase: Name of a step in the timeline.

    Attributes:
        recorder: Recorder for the executor, until the trace is complete.

    Raises:
        RuntimeError: A collective of the group has failed before.
    """

    def __init__(
        self, communicator: Communicator, file: Path, steps: int, contents: Contents, phase: str = "backward"
    ) -> None:
        self.recorder = Recorder(communicator.clock, keeps=True, ranges=False)
        self._communicator = communicator
        self._file = file
        self._left = self._steps = steps
        self._contents = contents
        self._phase = phase
        # Compare the clocks before the first step, and tie the device's clock to the host's.
        rounds = clock_rounds(communicator)
        if rounds is None:
            raise RuntimeError("a trace was requested, but a collective of this group has failed before: see the log")
        self._rounds = rounds
        self._anchor = communicator.clock.now()
        if not isinstance(self._anchor, float):
            self._anchor.synchronize()
        self._anchored = time.perf_counter()
        self._began: Mark | None = None
        self._last: tuple[int, Mark, Mark, Sequence[Bucket]] | None = None
        self._first_step = 0

    def step_began(self) -> None:
        """Notes the begin of a step, at its first bucket."""
        self._began = self._communicator.clock.now()

    def step_ended(self, step: int, buckets: Sequence[Bucket]) -> bool:
        """Notes the end of a backward pass. After the last step it gathers the notes of all ranks; rank 0 writes them.

        Args:
            step: Number of the step.
            buckets: Buckets of the step.

        Returns:
            True if the trace has ended: with its file, or with a logged reason why there is none.
        """
        if self._began is None:
            return False
        now = self._communicator.clock.now()
        self._note_step()
        self._last = step, self._began, now, buckets
        self._first_step = self._first_step or step
        self._left -= 1
        if self._left:
            return False
        for bucket in buckets:
            if bucket.future is not None and not bucket.flat.is_cuda:
                bucket.future.wait()
        self._note_step()
        self._write()
        return True

    def end_early(self) -> None:
        """Logs on rank 0 that training has ended before the last step to trace, and deletes the file if it is empty."""
        if self._communicator.rank:
            return
        made = self._steps - self._left
        log.warning(
            "the trace %s is not written: training ended after %d of its %d steps", self._file, made, self._steps
        )
        with suppress(OSError):
            if not self._file.stat().st_size:
                self._file.unlink()

    def _note_step(self) -> None:
        """Adds the intervals of the previous step, whose buckets have all been reduced by now."""
        last, self._last = self._last, None
        if last is None:
            return
        step, began, ended, buckets = last
        note, between = self.recorder.note, self._communicator.clock.between
        note(STEP, f"step {step}: {self._phase}", began, ended, step=step)
        latest = ended
        for bucket in buckets:
            arrived, reduced = bucket.times.arrived, bucket.times.reduced
            if arrived is None or reduced is None:
                continue
            names = self._contents.get(bucket.index, (0, ()))[1]
            note(
                BUCKETS,
                bucket_words(bucket.index, names),
                arrived,
                reduced,
                step=step,
                bucket=bucket.index,
                parameters=list(names),
                nbytes=bucket.flat.nbytes,
            )
            if between(latest, reduced) > 0:
                latest = reduced
        if latest is not ended:
            note(STEP, f"step {step}: wait for buckets", ended, latest, step=step)

    def _write(self) -> None:
        """Compares the clocks once more, gathers the notes of all ranks, and writes the file on rank 0."""
        communicator = self._communicator
        # Compare the clocks, and exchange the rounds before and after the steps.
        after = clock_rounds(communicator)
        flat = [each for rounds in (self._rounds, after or []) for pair in rounds for each in pair]
        rows = None if after is None else NumberExchange(communicator, flat).read()
        if rows is None:
            log.warning("the trace %s is not written: a collective has failed", self._file)
            return
        every = [list(zip(row[::2], row[1::2], strict=True)) for row in rows]
        offsets = [(offset(every[0][:ROUNDS], one[:ROUNDS]), offset(every[0][ROUNDS:], one[ROUNDS:])) for one in every]
        # Convert the times of this rank's notes to rank 0's clock, and gather all notes.
        before, after_steps = offsets[communicator.rank]
        start = every[0][ROUNDS - 1][1]
        own = [
            [
                note.track,
                note.name,
                aligned(self._seconds(note.began), before, after_steps) - start,
                aligned(self._seconds(note.ended), before, after_steps) - start,
                note.details,
            ]
            for note in self.recorder.notes
        ]
        parts = _gathered(communicator, json.dumps(own).encode())
        if parts is None:
            log.warning("the trace %s is not written: a collective has failed", self._file)
            return
        if communicator.rank:
            return
        # Rank 0 writes the file.
        notes = {rank: [Note(*each) for each in _NOTES.read(part)] for rank, part in parts.items()}
        errors = [max(first.error_seconds, last.error_seconds) for first, last in offsets]
        about = {
            "kind": KIND,
            "cluster": communicator.cluster.describe(),
            "plans": [plan.describe(communicator.cluster.level_names) for plan in communicator.rank_plans.plans()],
            "first_step": self._first_step,
            "steps": self._steps,
            "clock_error_seconds": errors,
            "device": communicator.device.type,
        }
        text = json.dumps(chrome(notes, communicator.hostnames, about))
        try:
            replace_text(self._file, text)
        except OSError as error:
            log.error("the trace cannot be written to %s: %s", self._file, error.strerror)
            return
        log.info("%d steps of %d ranks are in %s (%.1f MB)", self._steps, len(notes), self._file, len(text) / 1e6)

    def _seconds(self, mark: Mark) -> float:
        """Converts a mark to this rank's host clock."""
        return (
            mark if isinstance(mark, float) else self._anchored + self._communicator.clock.between(self._anchor, mark)
        )


def _gathered(communicator: Communicator, own: bytes) -> dict[int, bytes] | None:
    """Gathers bytes of each rank on all ranks, in one all-reduce that reports do not count.

    If they are more than 256 MiB (`MOST_NBYTES`) together, those of the last ranks are left out, with a warning.

    Args:
        communicator: Communicator of the ranks; all of them call it.
        own: Bytes of this rank.

    Returns:
        Rank -> its bytes; None if the group has failed.
    """
    lengths = NumberExchange(communicator, [float(len(own))]).read()
    if lengths is None:
        return None
    # Place the bytes of each rank in one buffer of whole 8-byte elements.
    spans, start = {}, 0
    for rank, (length,) in enumerate(lengths):
        elements = -(-int(length) // 8)
        if 8 * (start + elements) > MOST_NBYTES and rank:
            log.warning(
                "trace truncated: only the first %d of %d ranks fit into %d MiB", rank, len(lengths), MOST_NBYTES >> 20
            )
            break
        spans[rank] = start, int(length)
        start += elements
    flat = torch.zeros(start, dtype=torch.int64, device="cpu")
    if communicator.rank in spans and own:
        at = spans[communicator.rank][0]
        padded = bytearray(own.ljust(-(-len(own) // 8) * 8))
        flat[at : at + len(padded) // 8] = torch.frombuffer(padded, dtype=torch.int64)
    # Every rank adds its own bytes to zeros: the sum has those of all.
    flat = flat.to(communicator.device)
    bucket = Bucket.of(flat)
    communicator.start(AllReduce((flat,), None, (bucket,), counted=False))
    try:
        bucket.result().wait()
    except RuntimeError as error:
        log.debug("the ranks' notes were lost: %s", error)
        return None
    communicator.sync_current_stream()
    everything = flat.cpu().numpy().tobytes()
    return {rank: everything[8 * start : 8 * start + length] for rank, (start, length) in spans.items()}


def chrome(
    notes: Mapping[int, Sequence[Note]], hostnames: Sequence[str], about: Mapping[str, object]
) -> dict[str, object]:
    """Returns the contents of a file in the Trace Event Format.

    Args:
        notes: Rank -> its intervals, all by one clock, in seconds.
        hostnames: Host of each rank.
        about: Further values, for `otherData`.

    Source: Trace Event Format, Google, 2016; its `X` and `M` events.
    """
    # A rank is a process, and each row of a track a thread of it.
    events: list[Event] = []
    for rank, own in sorted(notes.items()):
        events.append(_named(rank, None, "process_name", f"rank {rank}, node {hostnames[rank]}"))
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        thread = 0
        for track in sorted({note.track for note in own}, key=_order):
            # Intervals of one thread may not overlap unless one contains the other, so a track may need several rows.
            rows = spread(
                sorted((note for note in own if note.track == track), key=lambda note: (note.began, -_end(note)))
            )
            for number, row in enumerate(rows):
                events.append(_named(rank, thread, "thread_name", track if not number else f"{track} ({number + 1})"))
                events.append(
                    {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
                )
                for note in row:
                    assert isinstance(note.began, float)
                    details = {name: value for name, value in note.details.items() if value is not None}
                    events.append(
                        {
                            "ph": "X",
                            "pid": rank,
                            "tid": thread,
                            "cat": track,
                            "name": note.name,
                            "ts": round(note.began * 1e6, 3),
                            "dur": round(max(_end(note) - note.began, 0.0) * 1e6, 3),
                            "args": details,
                        }
                    )
                thread += 1
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def spread(notes: Iterable[Note]) -> list[list[Note]]:
    """Distributes intervals to rows, so that any two of a row follow each other or lie one inside the other.

    Args:
        notes: Intervals, ascending by their begin, longer ones first.
    """
    rows: list[list[Note]] = []
    open_ends: list[list[float]] = []
    for note in notes:
        assert isinstance(note.began, float)
        # Take the first row whose open intervals have ended, or contain this one.
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= note.began:
                ends.pop()
            if not ends or _end(note) <= ends[-1]:
                row.append(note)
                ends.append(_end(note))
                break
        else:
            rows.append([note])
            open_ends.append([_end(note)])
    return rows


def _end(note: Note) -> float:
    assert isinstance(note.ended, float)
    return note.ended


def _order(track: str) -> tuple[int, str]:
    fixed = (STEP, BUCKETS, TRANSFERS)
    return (fixed.index(track) if track in fixed else len(fixed), track)


def _named(rank: int, thread: int | None, what: str, name: str) -> Event:
    where = {} if thread is None else {"tid": thread}
    return {"ph": "M", "pid": rank, **where, "name": what, "args": {"name": name}}
