"""Stall detection of the hook: names the rank that has not reached a bucket, long before the time-out.

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
from gradwire.comms.observe.diagnosis import Position, find_stuck
from gradwire.comms.observe.order import Waits
from gradwire.comms.observe.wording import stall_in_words
from gradwire.comms.report import bucket_words, duration
from gradwire.comms.run.executor import Executor

log = logging.getLogger("gradwire")

POLLS, SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 4, 0.02, 5.0
"""Looks of the thread in the time after which it warns, and their limits."""

PASSES = 3
"""How often all reports are read, a look apart, until all ranks have left one."""

CLOSE_SECONDS = 1.0
"""How long `close` waits for the thread, which may be in a call of the store."""

MOST_FAILURES = 3
"""The most failures of the store, in one stall; then the thread ends."""

COLLECTOR, DIAGNOSIS = "stall/collector", "stall/diagnosis"

Contents = Mapping[int, tuple[int, tuple[str, ...]]]
"""Bucket -> (elements, names of its parameters)."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """What a rank without progress says.

    Attributes:
        launches: How many it has started.
        seconds: For how long it has made no progress.
        number: The launch that it waits in; None where it waits in none, or does not know.
        phase: What that is: `reduce_scatter intra_node`.
        bucket: Which bucket that is, in words.
        where: What its own thread is doing: `train.py:88 in load`.
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
    """Meaning of the reports of all ranks.

    Attributes:
        text: One sentence for the log.
        late: Ranks for which the others wait, stragglers and silent ones; empty if all have reached the bucket.
    """

    text: str
    late: tuple[int, ...] = ()


def diagnose(
    reports: Mapping[int, StallReport], hostnames: Sequence[str], ranks: Sequence[int], *, on_cuda: bool = False
) -> StallDiagnosis | None:
    """Returns what the reports of all ranks mean; None if no rank waits for another.

    Args:
        reports: Rank of the communicator -> its report, of the ranks that have published one.
        hostnames: Host of each rank.
        ranks: Rank in the default group of each rank.
        on_cuda: Whether reports lack the launch in which a rank waits.
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
    """Returns rank -> its position in the sequence of launches.

    Args:
        reports: Rank -> its report.
        on_cuda: Whether reports lack the launch in which a rank waits. A rank then waits for the one with the fewest
            launches, if it has started more.
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
    """A time without progress in which this rank has left a report.

    Attributes:
        report: Which.
        collects: This rank reads all reports.
        passes: Looks that are left for the reports, or for the diagnosis.
        warned: The diagnosis is there.
    """

    report: StallReport
    collects: bool = False
    passes: int = 0
    warned: bool = False


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """Whom a rank watches.

    Attributes:
        rank: This one.
        hostnames: Names of all ranks' hosts.
        ranks: All ranks' places in the default group.
        contents: What each bucket holds.
        on_cuda: The gradients are on a CUDA device.
        waits: This rank's waits in the models of the job; None if they are not published.
    """

    rank: int
    hostnames: tuple[str, ...]
    ranks: tuple[int, ...]
    contents: Contents
    on_cuda: bool = False
    waits: Waits | None = None


class StallWatch:
    """One rank's thread that notices when there is no progress.

    Args:
        store: A store that all ranks share, with a prefix of its own; one whose waits block nobody else.
        job: Whom it watches.
        executor: Whose launches are watched.
        seconds: Without progress, until the first report.

    Attributes:
        last: What the last warning said, here or on the rank that gave it; None before one.
        count: How many there were.
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
        self._progress: tuple[int, tuple[int, str] | None] = (0, None)
        self._since = time.monotonic()
        self._next = seconds
        self._stall: Stall | None = None
        self._ended_stall: float | None = None
        """Seconds of a stall that has ended, until it is known that training continues."""
        self._all_here_said = False
        self._failures = 0
        if job.waits is not None:
            job.waits.know(self)
        poll_seconds = min(max(seconds / POLLS, SHORTEST_POLL_SECONDS), LONGEST_POLL_SECONDS)
        self._thread = BackgroundThread(
            f"gradwire stall watch {job.rank}",
            partial(self._run, poll_seconds),
            without=f"rank {job.rank} neither says nor hears what hangs",
            on_failure=lambda error: self._closed.set(),
            end=self._closed.set,
        )
        self._thread.start()

    @property
    def launches(self) -> int:
        """How many launches this rank has started."""
        return self._executor.launches

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self, poll_seconds: float) -> None:
        while not self._closed.wait(poll_seconds):
            try:
                self._look()
            except RuntimeError as error:  # a key is gone again, or the store: whoever waits will hear of that
                self._failures += 1
                log.debug("rank %d cannot say or hear what hangs: %s", self._job.rank, error)
                if self._failures == MOST_FAILURES:
                    return
            except (ValueError, TypeError, KeyError) as error:  # a report that another version, or a stranger, has left
                self._failures += 1
                log.debug("rank %d cannot read what another one says of a stall: %r", self._job.rank, error)
                if self._failures == MOST_FAILURES:
                    raise

    def _look(self) -> None:
        waiting = self._executor.oldest()
        where = None if waiting is None else (waiting.number, waiting.phase)
        progress = (self._executor.launches, where)
        if progress != self._progress:
            idle, started = time.monotonic() - self._since, progress[0] > self._progress[0]
            self._progress, self._since = progress, time.monotonic()
            self._go_on(idle)
            # A launch that fails ends as well: only a new launch shows that training continues.
            if started and self._ended_stall is not None:
                log.warning("stall: training continues after a stall of %s", duration(self._ended_stall))
                self._ended_stall = None
            return
        if self._executor.launches == 0:
            return
        passed = time.monotonic() - self._since
        if self._job.waits is not None and waiting is not None and passed >= self._seconds / 2:
            self._job.waits.say(waiting.number, self._bucket_name(waiting.bucket.index))
        if passed >= self._next:
            self._next = 2 * passed
            self._say(passed)
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
                self._heard(self._store.get(DIAGNOSIS).decode())

    def _heard(self, text: str) -> None:
        self.last = text
        self.count += 1

    def _say(self, passed: float) -> None:
        """Leaves this rank's report, and finds out who reads them."""
        from gradwire.comms.observe.stack import line_of_thread  # here: most jobs hang nowhere

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
        """Reads all reports, and says what they mean once all ranks have spoken, or have had the time to."""
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
        if self._job.waits is not None and (text := self._job.waits.disorder([job.ranks[rank] for rank in found.late])):
            found = StallDiagnosis(text)
        repeated = not found.late and self._all_here_said
        log.log(logging.INFO if repeated else logging.WARNING, "stall: %s", found.text)
        self._all_here_said |= not found.late
        stall.warned = True
        self._heard(found.text)
        self._store.set(DIAGNOSIS, found.text)

    def _with_buckets(self, reports: Mapping[int, StallReport]) -> dict[int, StallReport]:
        """Names the bucket that the last rank has not come to, where this one has (on CUDA)."""
        behind = self._executor.launches - min(report.launches for report in reports.values())
        carried = list(self._executor.carried)
        if not 0 < behind <= len(carried):
            return dict(reports)
        index = carried[-behind]
        named = self._bucket_name(index)
        return {rank: replace(report, bucket=named) for rank, report in reports.items()}

    def _bucket_name(self, index: int) -> str:
        return bucket_words(index, self._job.contents.get(index, (0, ()))[1])

    def _go_on(self, idle: float) -> None:
        """Takes this rank's report back."""
        self._next = self._seconds
        self._failures = 0
        if self._job.waits is not None:
            self._job.waits.take_back()
        stall, self._stall = self._stall, None
        if stall is None:
            return
        self._store.delete_key(f"stall/{self._job.rank}")
        if stall.collects:
            if stall.warned:
                self._ended_stall = idle
                self._store.delete_key(DIAGNOSIS)
            self._store.delete_key(COLLECTOR)
