"""Stall detection of the hook: names the rank that has not reached a bucket, long before the time-out.

A *launch* is one all-reduce of one or several buckets; all ranks start the same launches in the same order.

A rank that waits in a collective cannot ask the others in another collective. Each rank therefore has a thread that
polls, without traffic, whether this rank makes progress. After `seconds` without progress the thread publishes a report
in the store: how many launches this rank has started, what it waits in, and where its training thread is. One of the
waiting ranks reads all reports, at most `PASSES` times, and logs what they mean: the rank that has not started the
launch in which the others wait is the straggler. A rank without a report is frozen, or has failed.

Traffic: none while there is progress. In a stall, one report a rank, again after twice the time, and the reads of one
rank.

On CUDA the host does not know in which collective the device waits. Reports then hold only the number of launches that
were started, and a rank is a straggler if it has started fewer than another rank. If all have started the same number,
nothing is logged.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from gradwire.comms.bootstrap.compat import Store
from gradwire.comms.bootstrap.threads import BackgroundThread
from gradwire.comms.boundary.messages import MessageError, MessageType
from gradwire.comms.observe.diagnosis import Position, find_stuck, stall_in_words
from gradwire.comms.observe.order import Waits
from gradwire.comms.report import bucket_words
from gradwire.comms.run.executor import Executor
from gradwire.topology.wording import duration

log = logging.getLogger("gradwire")

POLLS, SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 4, 0.02, 5.0
"""Polls of the thread in the time after which it warns, and the limits of the interval between two of them."""

PASSES = 3
"""Polls in which the collector reads the reports, until all ranks have published one: others may poll later than it."""

CLOSE_SECONDS = 1.0
"""Longest time for which `close` waits for the thread, which may be in a request to the store."""

MOST_FAILURES = 3
"""Failed polls in one stall after which the thread ends: the store did not answer, or a report cannot be read."""

COLLECTOR, DIAGNOSIS = "stall/collector", "stall/diagnosis"
"""Keys of the rank that reads the reports, and of the sentence that it has logged."""

Contents = Mapping[int, tuple[int, tuple[str, ...]]]
"""Bucket -> (elements, names of its parameters)."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """Report of a rank without progress.

    Attributes:
        launches: Number of launches that the rank has started.
        seconds: Time without progress.
        number: Number of the launch in which the rank waits, from 0; None if it does not wait, or on CUDA, where the
            host does not know it.
        phase: Phase of that launch: `reduce_scatter intra_node`; None if it is not known.
        bucket: Bucket of that launch in words, with its parameters; None if it is not known.
        where: Line of the training thread: `train.py:88 in load`; None if it is not known.
    """

    launches: int
    seconds: float
    number: int | None = None
    phase: str | None = None
    bucket: str | None = None
    where: str | None = None


_REPORT: MessageType[StallReport] = MessageType(StallReport)


@dataclass(frozen=True, slots=True)
class StallDiagnosis:
    """Diagnosis of a stall from the reports of all ranks.

    Attributes:
        text: Sentence for the log that names the ranks and the bucket.
        late: Ranks for which the others wait, stragglers and silent ones; empty if all have reached the bucket.
    """

    text: str
    late: tuple[int, ...] = ()


def diagnose(
    reports: Mapping[int, StallReport], hostnames: Sequence[str], ranks: Sequence[int], *, on_cuda: bool = False
) -> StallDiagnosis | None:
    """Returns the diagnosis of a stall from the reports of all ranks; None if no rank waits for another.

    Args:
        reports: Rank of the communicator -> its report, of the ranks that have published one.
        hostnames: Host of each rank.
        ranks: Number in the default group of each rank of the communicator.
        on_cuda: True if the gradients are on CUDA devices: reports then lack the launch in which a rank waits.
    """
    positions = positions_of(reports, on_cuda=on_cuda)
    silent = [rank for rank in range(len(hostnames)) if rank not in reports]
    stuck = find_stuck("launches", range(len(hostnames)), positions, silent)
    if stuck is None:
        return None
    # Name the bucket as a rank does that waits in just this launch.
    waiting = [reports[rank] for rank in stuck.waiting]
    named = [each.bucket for each in waiting if each.number == stuck.number - 1] or [waiting[0].bucket]
    # Say in which phases the others wait, and how many ranks in each.
    phases = Counter(each.phase for each in waiting if each.phase)
    if on_cuda:
        waited_in = "for it on their devices"
    elif len(phases) == 1:
        waited_in = f"in {next(iter(phases))}"
    else:
        counts = (f"{phase} ({count} rank{'s' * (count > 1)})" for phase, count in sorted(phases.items()))
        waited_in = "in " + " and ".join(counts)
    text = stall_in_words(
        stuck,
        named[0] or "the next bucket",
        dict(enumerate(hostnames)),
        {rank: report.where for rank, report in reports.items() if report.where},
        waits=f"all others wait {waited_in}",
        waited_in=waited_in,
        rank_of=ranks.__getitem__,
    )
    return StallDiagnosis(text, (*stuck.missing, *stuck.silent))


def positions_of(reports: Mapping[int, StallReport], *, on_cuda: bool) -> dict[int, Position]:
    """Returns, for each rank, how many launches it has started and in which launch it waits, from the ranks' reports.

    A launch is one all-reduce of one or several buckets; all ranks start the same ones in the same order.

    Args:
        reports: Rank -> its report; at least one.
        on_cuda: True if the gradients are on CUDA devices, so that reports lack the launch in which a rank waits. Then
            a rank that has started more launches than the fewest of a rank waits in the first one that this rank has
            not started; ranks with the fewest wait in none.

    Returns:
        Rank -> launches started; launch in which it waits, counted from 1, None for none; seconds without progress.
    """
    least = min(report.launches for report in reports.values())
    found = {}
    for rank, report in reports.items():
        # Launches are counted from 0 in reports, from 1 in positions.
        if on_cuda:
            waits_in = least + 1 if report.launches > least else None
        else:
            waits_in = None if report.number is None else report.number + 1
        found[rank] = Position(report.launches, waits_in, report.seconds)
    return found


@dataclass(slots=True)
class Stall:
    """A stall for which this rank has published a report.

    Attributes:
        report: The report.
        collects: True if this rank reads all reports and diagnoses them.
        passes: Polls that are left for the reports, or for the diagnosis of the collector.
        warned: True if the diagnosis exists.
    """

    report: StallReport
    collects: bool = False
    passes: int = 0
    warned: bool = False


@dataclass(slots=True)
class _Progress:
    """Progress of this rank at the last poll.

    Attributes:
        launches: Number of launches that it has started.
        waits_in: Number and phase of the launch in which it waits; None if it waits in none.
        since: Monotonic time of the last change.
        ended_stall: Length of a stall that has ended, in seconds, until a new launch shows that training continues.
    """

    launches: int
    waits_in: tuple[int, str] | None
    since: float
    ended_stall: float | None = None


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """The ranks of a communicator that a stall watch diagnoses, and what its messages call them.

    Attributes:
        rank: This rank, in the communicator.
        hostnames: Host of each rank of the communicator.
        ranks: Number in the default group of each rank of the communicator; messages name it.
        contents: Index of a bucket -> (number of elements, names of its parameters).
        on_cuda: True if the gradients are on CUDA devices.
        waits: Waits of this rank in all models of the job; None if they are not published.
    """

    rank: int
    hostnames: tuple[str, ...]
    ranks: tuple[int, ...]
    contents: Contents
    on_cuda: bool = False
    waits: Waits | None = None


class StallWatch:
    """Thread of one rank that logs which ranks the others wait for, if this rank makes no progress for some time.

    A rank makes progress when it starts a launch (an all-reduce of buckets), or the one that it waits in enters another
    phase or ends. Without progress for `seconds`, the thread publishes a report in the store. The first rank that does
    so while it waits in a launch reads the reports of all ranks, and logs the diagnosis, which the other ranks read.

    Thread safety: the thread alone changes the state; `last` and `count` may be read from any thread.

    Args:
        store: Store of all ranks, with a prefix of its own. Requests to it must not block other threads' requests.
        job: Ranks to diagnose.
        executor: Executor whose launches are watched.
        seconds: Time without progress until the first report; the next follow after twice the time each.

    Attributes:
        last: Sentence of the last diagnosis, made by this rank or read from another; None before the first one.
        count: Number of diagnoses so far.
    """

    def __init__(self, store: Store, job: WatchedJob, executor: Executor, seconds: float) -> None:
        self.last: str | None = None
        self.count = 0
        self._store = store
        self._job = job
        self._executor = executor
        self._seconds = seconds
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._progress = _Progress(0, None, time.monotonic())
        self._next = seconds
        self._stall: Stall | None = None
        self._all_reached = False
        self._failures = 0
        if job.waits is not None:
            job.waits.register(self)
        poll_seconds = min(max(seconds / POLLS, SHORTEST_POLL_SECONDS), LONGEST_POLL_SECONDS)
        self._thread = BackgroundThread(
            f"gradwire stall watch {job.rank}",
            partial(self._run, poll_seconds),
            without=f"stalls are not diagnosed on rank {job.rank}",
            on_failure=lambda error: self._closed.set(),
            end=self._closed.set,
        )
        self._thread.start()

    @property
    def launches(self) -> int:
        """Number of launches that this rank has started."""
        return self._executor.launches

    def close(self) -> None:
        """Ends the thread, and waits for it for up to `CLOSE_SECONDS`; what it has published in the store stays."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self, poll_seconds: float) -> None:
        """Polls until `close`: the thread's body. It gives up after `MOST_FAILURES` failed polls within one stall.

        Args:
            poll_seconds: Interval of the polls.

        Raises:
            ValueError: The last of these polls found a report that cannot be read (also TypeError, KeyError). If the
                store failed in it, the thread just ends: the training thread reports that.
        """
        while not self._closed.wait(poll_seconds):
            try:
                self._poll()
            except RuntimeError as error:
                # The store is gone, which the training thread will report, or a key was deleted meanwhile.
                self._failures += 1
                log.debug("rank %d cannot reach the store to diagnose a stall: %s", self._job.rank, error)
                if self._failures == MOST_FAILURES:
                    return
            except (ValueError, TypeError, KeyError) as error:
                # The report of another version, or of another program.
                self._failures += 1
                log.debug("rank %d cannot read another one's report of a stall: %r", self._job.rank, error)
                if self._failures == MOST_FAILURES:
                    raise

    def _poll(self) -> None:
        """Compares the progress with that of the last poll; reports, collects or reads the diagnosis as needed."""
        waiting, launches, was = self._executor.oldest(), self._executor.launches, self._progress
        waits_in = None if waiting is None else (waiting.number, waiting.phase)
        # With progress: end the stall. A launch that fails ends, too, so only a new one shows that training continues.
        if (launches, waits_in) != (was.launches, was.waits_in):
            now = time.monotonic()
            self._progress = _Progress(launches, waits_in, now, was.ended_stall)
            self._end_stall(now - was.since)
            ended = self._progress.ended_stall
            if launches > was.launches and ended is not None:
                self._progress.ended_stall = None
                log.warning("stall: training continues after a stall of %s", duration(ended))
            return
        if launches == 0:
            return
        # Without progress: publish the wait for ranks in other models, then the report, and again after twice the time.
        passed = time.monotonic() - was.since
        if self._job.waits is not None and waiting is not None and passed >= self._seconds / 2:
            self._job.waits.publish(waiting.number, self._bucket_name(waiting.bucket.index))
        if passed >= self._next:
            self._next = 2 * passed
            self._publish(passed)
        # Collect all reports, or read what the collector has made of them.
        stall = self._stall
        if stall is None or not stall.passes or (stall.report.number is None and not self._job.on_cuda):
            return
        if stall.collects:
            stall.passes -= 1
            self._collect(stall, passed)
        elif not stall.warned:
            stall.passes -= 1
            if self._store.check([DIAGNOSIS]):
                stall.warned = True
                self._note(self._store.get(DIAGNOSIS).decode())

    def _note(self, text: str) -> None:
        """Keeps the sentence about a diagnosed stall in `last`, and counts it in `count`."""
        self.last = text
        self.count += 1

    def _publish(self, passed: float) -> None:
        """Publishes the report of this rank; the first waiting rank that does becomes the collector.

        Args:
            passed: Seconds without progress on this rank.
        """
        # Imported here, because most jobs have no stall.
        from gradwire.comms.observe.stack import line_of_thread

        waiting = self._executor.oldest()
        launches, where = self._executor.launches, line_of_thread(self._watched)
        if waiting is not None:
            named = self._bucket_name(waiting.bucket.index)
            report = StallReport(launches, passed, waiting.number, waiting.phase, named, where)
        else:
            report = StallReport(launches, passed, where=where)
        first, stall = self._stall is None, self._stall or Stall(report)
        stall.report, self._stall = report, stall
        self._store.set(f"stall/{self._job.rank}", json.dumps(asdict(report)))
        if report.number is None and not self._job.on_cuda:
            return
        if first:
            stall.collects = int(self._store.compare_set(COLLECTOR, "", str(self._job.rank))) == self._job.rank
        stall.passes = PASSES + (not stall.collects) * POLLS
        stall.warned = False

    def _collect(self, stall: Stall, passed: float) -> None:
        """Reads all reports, and diagnoses them once all ranks have published one or had the time to.

        The diagnosis, if a rank waits for another, is logged, kept in `last`, and published for the other ranks.

        Args:
            stall: The stall of this rank, which is the collector; changed in place.
            passed: Seconds without progress on this rank.
        """
        job = self._job
        reports = {job.rank: replace(stall.report, seconds=passed)}
        for rank in range(len(job.hostnames)):
            key = f"stall/{rank}"
            if rank != job.rank and self._store.check([key]):
                try:
                    reports[rank] = _REPORT.read(self._store.get(key))
                except MessageError as error:
                    log.debug("the report of rank %d cannot be read: %s", rank, error)
        reports = dict(sorted(reports.items()))
        if len(reports) < len(job.hostnames) and stall.passes:
            return
        stall.passes = 0
        if job.on_cuda:
            reports = self._with_buckets(reports)
        found = diagnose(reports, job.hostnames, job.ranks, on_cuda=job.on_cuda)
        if found is None:
            return
        # A rank that waits for this one in another model is not a straggler.
        if job.waits is not None and (text := job.waits.find_disorder([job.ranks[rank] for rank in found.late])):
            found = StallDiagnosis(text)
        # A slow link is logged as a warning once: it may make every step stall.
        repeated = not found.late and self._all_reached
        log.log(logging.INFO if repeated else logging.WARNING, "stall: %s", found.text)
        self._all_reached |= not found.late
        stall.warned = True
        self._note(found.text)
        self._store.set(DIAGNOSIS, found.text)

    def _with_buckets(self, reports: Mapping[int, StallReport]) -> dict[int, StallReport]:
        """Adds to each report the bucket that the rank with the fewest launches has not reached (on CUDA).

        Returns:
            The reports; unchanged if this rank has not started that bucket either, or no longer knows it.
        """
        behind = self._executor.launches - min(report.launches for report in reports.values())
        carried = list(self._executor.carried)
        if not 0 < behind <= len(carried):
            return dict(reports)
        named = self._bucket_name(carried[-behind])
        return {rank: replace(report, bucket=named) for rank, report in reports.items()}

    def _bucket_name(self, index: int) -> str:
        return bucket_words(index, self._job.contents.get(index, (0, ()))[1])

    def _end_stall(self, seconds: float) -> None:
        """Resets the stall detection; called at every poll that sees progress, whether or not there was a stall.

        If this rank had published a report, its keys are deleted in the store. If it had also diagnosed the stall,
        `_poll` logs the length of the stall once the next launch shows that training continues.

        Args:
            seconds: Time since the last progress before.
        """
        self._next = self._seconds
        self._failures = 0
        if self._job.waits is not None:
            self._job.waits.withdraw()
        stall, self._stall = self._stall, None
        if stall is None:
            return
        self._store.delete_key(f"stall/{self._job.rank}")
        if stall.collects:
            if stall.warned:
                self._progress.ended_stall = seconds
                self._store.delete_key(DIAGNOSIS)
            self._store.delete_key(COLLECTOR)
