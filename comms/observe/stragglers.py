"""Straggler detection of the hook: names the slowest rank, its node, the delay, the bucket, or a slow link.

An all-reduce makes the steps of all ranks equally long, so step times do not show which rank is slow. But the hook sees
each bucket arrive before it waits, and a straggler waits less than the others. The measure is therefore the wait from a
bucket's arrival to its reduction, on each rank's own clock. A bucket ends on all ranks at nearly the same moment,
because no rank has the sum before the last rank has contributed. So the difference of two ranks' waits is the
difference of their arrivals, whatever their clocks show. For transfers, the measure is the time of the rank that
entered a phase last: it waited for no other rank, so all of its time is the link's.

Packet loss is an exception: the last message of a bucket may reach one rank a second after the others have the sum.
That rank then waits longer, and arrives later in the next step, without a fault in either. Over many steps this
happens to all ranks equally. A single long wait is therefore explained not by waits but by the time that each rank took
by itself: from the end of the previous step, on its own clock, to the bucket's arrival.

**What is sent.** Every `SUMMARY_STEPS` steps (less often if steps are short) each rank sends a summary of four numbers.
All ranks decide from the same numbers whether they need a breakdown in the next step: two to four numbers a bucket.
Without a reason there is a breakdown every `every` steps. Everything is sent in one small all-reduce that no host waits
for.

**When a rank is named.** Over the last `WINDOW` steps, the rank's longest wait, without its `OUTLIERS` longest ones,
must be shorter than the shortest wait of the median rank, without its `OUTLIERS` shortest ones, by more than the margin
`WEAK`. So in at least six of eight steps the rank was later than the median rank by that margin. If p is the share of
steps in which that happens by chance, eight steps give a false alarm with a probability of less than 28 p^6, and two
breakdowns in a row, which are required, with 784 p^12: below 1e-9 at p = 0.1, 3e-6 at p = 0.2. A rank that is behind by
more than the margin `STRONG` is named after one breakdown, because p is tiny there. A rank is no longer named after two
breakdowns without it. Source: the tail of the binomial distribution, C(8, 6) p^6 (1 - p)^2 + ... <= 28 p^6.

**When a link is named.** Transfers of a step are compared in the same way with those of the other links, or of earlier
steps, in two breakdowns in a row. Links are compared when all ranks wait longer; a link that is slow from the first
step on is not found. There are no links inside a node of CPUs: a slow transfer there is a busy processor.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain, repeat
from math import ceil
from operator import sub

from gradwire.comms.communicator import Communicator
from gradwire.comms.observe.diagnosis import STRONG, Margin, behind_median, median_rank
from gradwire.comms.observe.number_exchange import NumberExchange
from gradwire.comms.report import COMPUTES_LATE, SLOW_LINK, Straggler
from gradwire.comms.run.all_reduces import Times

log = logging.getLogger("gradwire")

WINDOW, OUTLIERS = 8, 1
"""Steps that a breakdown covers, and outliers that it ignores on either side: a garbage collection, a checkpoint."""

SUMMARY_STEPS = 12
"""Steps between two summaries. The first one may miss four late steps; then follow the next summary, the breakdown and
the all-reduce of its numbers: a straggler is named after 4 + 12 + 2 steps at the latest."""

SUMMARY_SECONDS = 0.24
"""Least time between two summaries. An exchange takes 0.3 to 0.4 ms of a rank's own thread on a busy machine, and short
steps should not spend more of that in a second than long ones. Figures: docs/results/diagnosis.md."""

WEAK = Margin(5e-3, 0.05)
"""Margin above which a rank is behind: a time slice of the kernel's scheduler, and a twentieth of a step. The larger
margin `STRONG` suffices in one breakdown."""

LONG_SECONDS = 1.0
"""Time by which a single wait must be longer than usual to be explained."""

SLOW_LINK_RATIO, SLOWER_RATIO = 1.5, 2.0
"""Least ratio of the fastest transfers of a link in the window to the slowest ones of other links; and to three
quarters of its own before the window."""

USUAL_STEPS = 2 * WINDOW
"""Least number of steps before the window that tell what is usual."""

USUAL_SUMMARIES = 8
"""Number of summaries that tell what is usual. The rank that waits least waits only for links: if it waits
`SLOW_LINK_RATIO` times as long as in their median, a breakdown follows."""

MOST_BUCKETS, MANY_RANKS, FEW_BUCKETS = 64, 512, 16
"""Most buckets in a breakdown; number of ranks above which it has fewer; and most buckets then. With more buckets, one
in several stands for its neighbours."""

MOST_PHASES = 6
"""Most phases of a plan whose times are sent."""
KEPT_STEPS, MOST_UNREAD = 128, 32
"""Steps whose samples are kept, and steps after which their times are read although nothing is sent."""

Names = Callable[[int], tuple[str, ...]]
"""Function that returns the names of the parameters of a bucket, by its place in the step."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one step on one rank, in seconds.

    Attributes:
        step: Number of the step.
        waits: Time from the arrival of each bucket at the hook to the end of its all-reduce.
        phases: Time in each phase of the plan, summed over the buckets.
        own: Time that this rank took by itself before each bucket arrived: from the end of the previous step's last
            all-reduce to the arrival. -1 if that end is not known.
    """

    step: int
    waits: tuple[float, ...]
    phases: tuple[float, ...]
    own: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Times of a rank's last 8 steps (`WINDOW`) in four numbers, sent every 12 steps; less often if steps are short.

    Attributes:
        wait_seconds: Median over the steps of the waits for all buckets of a step together; negative if fewer than 8
            steps with the same number of buckets were timed.
        longest_seconds: Largest excess of a single wait, since the last summary, over its bucket's median; 0 if none.
        longest_step: Number of the step of that wait; -1 if none.
        step_seconds: Median length of a step.
    """

    wait_seconds: float
    longest_seconds: float
    longest_step: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Times of a rank's last 8 steps (`WINDOW`) by bucket and phase, in seconds, for the comparison with other ranks.

    Each rank sends one every `every` steps, and one more as soon as a summary shows that ranks, a single long wait or a
    link need an explanation. Columns are buckets or, if there are many, groups of neighbouring ones. Values are
    negative if they are not known: all but `step_seconds` and `once` as long as fewer than 8 steps with the same number
    of buckets were timed. "Without outliers" leaves out the one most extreme step (`OUTLIERS`).

    Attributes:
        step_seconds: Median length of a step.
        since_step: Number of the first step since which the rank has waited about as long as it does now.
        fast: Shortest time of a step in each of `MOST_PHASES` phases, without outliers.
        slow: Longest time of a step in each phase, without outliers.
        usual: Time that three quarters of the steps before the last 8 did not exceed, for each phase; negative with
            fewer than 16 such steps.
        low: Shortest wait for each column, without outliers; see `Sample.waits`.
        middle: Median wait for each column.
        high: Longest wait for each column, without outliers.
        once: For each column, the time that the rank took by itself (`Sample.own`) in the one step whose single long
            wait is to be explained; negative if there is no such step.
    """

    step_seconds: float
    since_step: float
    fast: tuple[float, ...]
    slow: tuple[float, ...]
    usual: tuple[float, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]
    once: tuple[float, ...]

    def numbers(self) -> list[float]:
        """Returns the numbers that are sent: all fields in their order, as one flat list."""
        phases = (*self.fast, *self.slow, *self.usual)
        return [self.step_seconds, self.since_step, *phases, *self.low, *self.middle, *self.high, *self.once]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Breakdown":
        """Returns the breakdown with these `numbers`."""
        head = 2 + 3 * MOST_PHASES
        rest = (len(numbers) - head) // 4
        phases = [tuple(numbers[2 + part * MOST_PHASES : 2 + (part + 1) * MOST_PHASES]) for part in range(3)]
        columns = [tuple(numbers[head + part * rest : head + (part + 1) * rest]) for part in range(4)]
        return cls(numbers[0], numbers[1], *phases, *columns)


@dataclass(frozen=True, slots=True)
class Late:
    """A rank whose gradients arrive late.

    Attributes:
        rank: Rank in the communicator.
        column: Column of the breakdown (bucket, or group of buckets) at which the delay begins.
        seconds: Longest delay over the columns, compared with the median rank.
        strong: True if one breakdown suffices to name it.
    """

    rank: int
    column: int
    seconds: float
    strong: bool


@dataclass(frozen=True, slots=True)
class _SlowLink:
    """A phase of the plan whose transfers take too long.

    Attributes:
        phase: Index of the phase in the plan.
        since_step: Number of the step since which they do, approximately.
        before: Time of a step's transfers before that, in seconds.
    """

    phase: int
    since_step: int
    before: float


@dataclass(slots=True)
class _Ended:
    """A step that has ended, and whose times have not been read yet.

    Attributes:
        step: Number of the step.
        buckets: Times of its buckets.
        previous: Times of the last bucket of the previous step; None if that was not timed.
        before: Total seconds in each phase when its last bucket had arrived.
        after: The same, one step later.
    """

    step: int
    buckets: Sequence[Times]
    previous: Times | None
    before: list[float]
    after: list[float] = field(default_factory=list)


def _median(ordered: Sequence[float]) -> float:
    """Returns the median of ascending numbers; several times as fast as `statistics.median`, which checks types."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def late_ranks(breakdowns: Sequence[Breakdown]) -> list[Late]:
    """Returns the ranks that were late in at least six of the last eight steps, the longest delay first.

    A rank is late if its longest wait, without the longest one of the eight, is shorter than the shortest wait of the
    median rank, without its shortest one, by more than 5 ms and 5 % of a step (`WEAK`), for some bucket. Of two ranks
    that wait for one bucket the one that waits less has arrived later.

    Args:
        breakdowns: Breakdowns of all ranks, in their order.
    """
    step_seconds = statistics.median(breakdown.step_seconds for breakdown in breakdowns)
    least, much = WEAK.of(step_seconds), STRONG.of(step_seconds)
    columns = min(len(breakdown.low) for breakdown in breakdowns)
    reference = [median_rank([each.middle[column] for each in breakdowns]) for column in range(columns)]
    found = []
    for rank, breakdown in enumerate(breakdowns):
        behind = [breakdowns[reference[column]].middle[column] - breakdown.middle[column] for column in range(columns)]
        apart = [breakdowns[reference[column]].low[column] - breakdown.high[column] for column in range(columns)]
        worst = max(range(columns), key=apart.__getitem__, default=None)
        if worst is None or apart[worst] <= least or min(breakdown.low[0], breakdowns[reference[0]].low[0]) < 0:
            continue
        # A rank stays late once it is: the delay begins where it grows most.
        grown = [behind[column] - max(behind[column - 1] if column else 0.0, 0.0) for column in range(worst + 1)]
        column = max(range(worst + 1), key=grown.__getitem__)
        found.append(Late(rank, column, max(behind), apart[worst] > much))
    return sorted(found, key=lambda late: -late.seconds)


def _is_slow(seconds: float, usual: float, length: float, ratio: float = SLOW_LINK_RATIO) -> bool:
    """Returns whether a step's transfers take so much longer than usual that their link is called slow.

    They must take `ratio` times as long, and longer by more than 5 ms and 5 % of a step (`WEAK`).

    Args:
        seconds: Time of the transfers.
        usual: Usual time of them.
        length: Length of a step in seconds.
        ratio: Least ratio of both.
    """
    return seconds > ratio * usual and seconds - usual > WEAK.of(length)


def late_once(breakdowns: Sequence[Breakdown]) -> Late | None:
    """Returns the rank for which the others waited in the one step whose single long wait is to be explained.

    Args:
        breakdowns: Breakdowns of all ranks.

    Returns:
        The rank that took over 1 s longer by itself before a bucket (`Breakdown.once`) than the median rank (of two,
        the faster one); None if no rank did. Then the ranks waited for a link.
    """
    found: Late | None = None
    for column in range(min(len(breakdown.once) for breakdown in breakdowns)):
        own = [breakdown.once[column] for breakdown in breakdowns]
        last, middle = max(own), sorted(own)[(len(own) - 1) // 2]
        if min(own) >= 0 and last - middle > max(LONG_SECONDS, found.seconds * 1.1 if found else 0.0):
            found = Late(own.index(last), column, last - middle, strong=True)
    return found


def summaries_differ(summaries: Sequence[Summary], known: frozenset[int]) -> bool:
    """Returns whether a breakdown is needed: the set of late ranks, by the summaries, is no longer the known one.

    A rank is late if it waits less than the median rank, by more than the margin `WEAK`. So a rank that has become late
    is a reason, and so is a known one that no longer is. False if a rank had too few steps.

    Args:
        summaries: Summaries of all ranks, in their order.
        known: Ranks, in the communicator, that were named as late after the last breakdown.
    """
    if any(summary.wait_seconds < 0 for summary in summaries):
        return False
    least = WEAK.of(statistics.median(summary.step_seconds for summary in summaries))
    delays = behind_median([summary.wait_seconds for summary in summaries])
    return {rank for rank, delay in enumerate(delays) if delay > least} != known


class _OwnSteps:
    """Times of a rank's own steps, and the summaries and breakdowns that it sends.

    Args:
        communicator: Communicator of the gradients.

    Attributes:
        count: Number of buckets of the last step.
        unread: Ended steps whose times have not been read yet.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.count = 0
        self.unread: list[_Ended] = []
        self._communicator = communicator
        self._samples: deque[Sample] = deque(maxlen=KEPT_STEPS)
        self._lengths: deque[float] = deque(maxlen=WINDOW)
        self._last: _Ended | None = None
        self._ended: float | None = None

    def note(self, step: int, buckets: Sequence[Times]) -> bool:
        """Records the end of a step, and completes the record of the previous one, whose buckets are reduced by now.

        Args:
            step: Number of the step, ascending by one.
            buckets: Times of its buckets; read if the step was timed.

        Returns:
            True if a previous timed step was added to `unread`; False if there was none.
        """
        now = time.perf_counter()
        if self._ended is not None:
            self._lengths.append(now - self._ended)
        self._ended = now
        self.count = len(buckets)
        stats, last = self._communicator.executor.stats, self._last
        timed = stats.timing and bool(buckets)
        if timed or last is not None:
            seconds = stats.seconds_of_phases()
            # The buckets of the previous step have all been reduced only now.
            if last is not None:
                last.after = seconds
                self.unread.append(last)
            previous = last.buckets[-1] if last is not None and last.step == step - 1 else None
            self._last = _Ended(step, buckets, previous, seconds) if timed else None
        return last is not None

    def read(self) -> None:
        """Converts unread steps to samples. Deferred, so that steps in which nothing is sent cost nothing.

        A step with a bucket that has failed, or is still in flight, is dropped.
        """
        between = self._communicator.clock.between
        keys = list(self._communicator.executor.stats.phase_seconds())
        for ended in self.unread:
            waits = tuple(
                between(each.arrived, each.reduced)
                for each in ended.buckets
                if each.arrived is not None and each.reduced is not None
            )
            # A bucket has failed, or is still in flight.
            if len(waits) < len(ended.buckets):
                continue
            end = ended.previous.reduced if ended.previous is not None else None
            own = tuple(
                between(end, each.arrived) if end is not None and each.arrived is not None else -1.0
                for each in ended.buckets
            )
            phases = [0.0] * MOST_PHASES
            # A phase may be new in this step: its total before was 0.
            before = chain(ended.before, repeat(0.0))
            for (place, _, _), seconds, had in zip(keys, ended.after, before, strict=False):
                if place < MOST_PHASES:
                    phases[place] += seconds - had
            self._samples.append(Sample(ended.step, waits, tuple(phases), own))
        self.unread.clear()

    def _window(self) -> list[Sample]:
        """Returns the last `WINDOW` samples with as many buckets as the last step; fewer if there are not so many."""
        return [sample for sample in self._samples if len(sample.waits) == self.count][-WINDOW:]

    def columns(self) -> tuple[int, ...]:
        """Returns the indices of the buckets in a breakdown: all, or if too many the last of every few in a row.

        All ranks get the same.
        """
        count = self.count
        most = MOST_BUCKETS if self._communicator.size <= MANY_RANKS else FEW_BUCKETS
        group = max(1, ceil(count / most))
        return tuple(min(first + group, count) - 1 for first in range(0, count, group))

    def summary(self, since: int) -> Summary:
        """Returns the summary of the last `WINDOW` samples with as many buckets as the last step.

        `longest_seconds` is not a whole wait: it is the most by which the wait for one bucket, in a step from `since`
        on, exceeded the median of that bucket's waits in the window; 0 if none did. With fewer than `WINDOW` samples
        only `step_seconds` is known: the other fields are -1, 0 and -1.

        Args:
            since: Number of the first step that no summary has covered yet.
        """
        window = self._window()
        length = _median(sorted(self._lengths)) if self._lengths else 0.0
        if len(window) < WINDOW:
            return Summary(-1.0, 0.0, -1.0, length)
        usual = [_median(sorted(column)) for column in zip(*(sample.waits for sample in window), strict=True)]
        longest, step = 0.0, -1
        for sample in self._samples:
            if sample.step >= since and len(sample.waits) == self.count:
                excess = max(map(sub, sample.waits, usual))
                if excess > longest:
                    longest, step = excess, sample.step
        return Summary(_median(sorted(sum(sample.waits) for sample in window)), longest, step, length)

    def breakdown(self, long_step: int | None) -> Breakdown:
        """Returns the breakdown of the last `WINDOW` samples with as many buckets as the last step.

        Args:
            long_step: Step with a long wait that is to be explained; None without one.
        """
        window, columns = self._window(), self.columns()
        length = _median(sorted(self._lengths)) if self._lengths else 0.0
        sample = next((each for each in self._samples if each.step == long_step), None)
        if sample is None or len(sample.waits) != self.count:
            once = tuple(-1.0 for _ in columns)
        else:
            once = tuple(sample.own[column] for column in columns)
        none = tuple(-1.0 for _ in columns)
        if len(window) < WINDOW:
            unknown = (-1.0,) * MOST_PHASES
            return Breakdown(length, -1.0, unknown, unknown, unknown, none, none, none, once)
        waits = [sorted(sample.waits[column] for sample in window) for column in columns]
        phases = [sorted(seconds) for seconds in zip(*(each.phases for each in window), strict=True)]
        return Breakdown(
            length,
            float(self._since()),
            tuple(each[OUTLIERS] for each in phases),
            tuple(each[-1 - OUTLIERS] for each in phases),
            self._usual(),
            tuple(each[OUTLIERS] for each in waits),
            tuple(_median(each) for each in waits),
            tuple(each[-1 - OUTLIERS] for each in waits),
            once,
        )

    def _usual(self) -> tuple[float, ...]:
        """Returns the usual time of a step in each phase: three quarters of the steps before the window took no longer.

        Returns:
            Seconds for each of `MOST_PHASES` phases; -1 for all of them with less than `USUAL_STEPS` such steps.
        """
        before = [sample for sample in self._samples if len(sample.waits) == self.count][:-WINDOW]
        if len(before) < USUAL_STEPS:
            return (-1.0,) * MOST_PHASES
        ordered = (sorted(seconds) for seconds in zip(*(each.phases for each in before), strict=True))
        return tuple(each[3 * len(each) // 4] for each in ordered)

    def _since(self) -> int:
        """Returns the number of the first step since which this rank has waited about as long as now.

        It looks at the kept samples, of up to 128 steps (`KEPT_STEPS`), that have as many buckets as the last step, and
        at the waits for all buckets of a step together. "Now" is their median over the last `WINDOW` samples, "least"
        the smallest of the medians of each `WINDOW` in a row, from the oldest on. If now exceeds least by less than
        30 % of now, nothing has changed, and it returns the oldest step. Otherwise it goes back from the newest step
        until two in a row waited no longer than halfway between the two, and returns the earliest that waited longer.
        """
        sums = [(sample.step, sum(sample.waits)) for sample in self._samples if len(sample.waits) == self.count]
        now = _median(sorted(wait for _, wait in sums[-WINDOW:]))
        least = min(
            _median(sorted(wait for _, wait in sums[first : first + WINDOW]))
            for first in range(0, max(1, len(sums) - WINDOW + 1), WINDOW)
        )
        if now - least < 0.3 * now:
            return sums[0][0]
        since, strays = sums[-1][0], 0
        for step, wait in reversed(sums):
            if wait > (now + least) / 2:
                since, strays = step, 0
            elif (strays := strays + 1) > OUTLIERS:
                break
        return since


class _Diagnosis:
    """Diagnosis of the breakdowns of all ranks; every rank draws the same conclusions from the same numbers.

    Args:
        communicator: Communicator of the gradients.
        names: Returns the parameters of a bucket.
        ranks: Number in the default group of each rank of the communicator; messages name it.

    Attributes:
        found: Stragglers and slow links as of the last breakdown.
        once: Rank for which the others waited in the latest single long wait; None before the first one.
        suspects: Ranks that were late in the last breakdown, and are named if they are late in the next one.
        confirms_link: True if a link was slow in the last breakdown, and is named if it is slow in the next one.
    """

    def __init__(self, communicator: Communicator, names: Names, ranks: Sequence[int]) -> None:
        self.found: tuple[Straggler, ...] = ()
        self.once: Straggler | None = None
        self.suspects: frozenset[int] = frozenset()
        self.confirms_link = False
        self._communicator = communicator
        self._names = names
        self._ranks = tuple(ranks)
        self._missed = 0
        self._slow_link: _SlowLink | None = None

    def update(self, breakdowns: Sequence[Breakdown], columns: tuple[int, ...], long_step: int | None) -> None:
        """Updates `found`, `once`, `suspects` and `confirms_link`, and logs on rank 0 what is new or gone.

        Args:
            breakdowns: Breakdowns of all ranks.
            columns: Index of the bucket, or of the last of a group, that each column of the breakdowns is about.
            long_step: Step with a long wait that is to be explained; None without one.
        """
        length = statistics.median(breakdown.step_seconds for breakdown in breakdowns)
        # Explain a single long wait, once.
        repeated = self.once is not None and self.once.since_step == long_step
        if long_step is not None and not repeated and (late := late_once(breakdowns)) is not None:
            self.once = self._late((self._ranks[late.rank],), late, columns, length, long_step, once=True)
            self._log(self.once)
        if any(not breakdown.low or breakdown.low[0] < 0 for breakdown in breakdowns):
            return
        # Name ranks that are late by much, or in two breakdowns in a row; look at links only if no rank is late.
        late_now = late_ranks(breakdowns)
        named = self.named()
        sure = [late for late in late_now if late.strong or late.rank in self.suspects | named]
        self.suspects = frozenset(late.rank for late in late_now) - {late.rank for late in sure}
        found = self._stragglers(sure, breakdowns, columns, length)
        if not late_now:
            found += self._links_of(breakdowns, length)
        # Keep the last findings until a second breakdown does not show them.
        if not found and self.found:
            self._missed += 1
            if self._missed < 2:
                self.suspects |= named
                return
        self._missed = 0
        self._change(found)

    def _stragglers(
        self, late: Sequence[Late], breakdowns: Sequence[Breakdown], columns: tuple[int, ...], length: float
    ) -> list[Straggler]:
        """Returns the findings about late ranks: one for each node that has some.

        Args:
            late: Late ranks that are sure, the longest delay first.
            breakdowns: Breakdowns of all ranks, by which the first late step is found.
            columns: Index of the bucket of each column of the breakdowns.
            length: Length of a step in seconds.
        """
        stragglers = {each.rank for each in late}
        since = [each.since_step for rank, each in enumerate(breakdowns) if rank not in stragglers]
        first = int(statistics.median_low(since)) if since else -1
        nodes: dict[tuple[int, ...], list[Late]] = {}
        for each in late:
            nodes.setdefault(self._node_ranks(each.rank), []).append(each)
        found = []
        for members in nodes.values():
            ranks = tuple(sorted(self._ranks[each.rank] for each in members))
            before = next((old for old in self.found if old.cause == COMPUTES_LATE and old.ranks == ranks), None)
            found.append(self._late(ranks, members[0], columns, length, before.since_step if before else first))
        return found

    def _late(
        self,
        ranks: tuple[int, ...],
        worst: Late,
        columns: tuple[int, ...],
        length: float,
        since: int,
        once: bool = False,
    ) -> Straggler:
        """Returns the finding about late ranks of one node.

        Args:
            ranks: The late ranks, by their numbers in the default group.
            worst: The one with the longest delay, and the column of the breakdowns in which it begins.
            columns: Index of the bucket of each column of the breakdowns.
            length: Length of a step in seconds.
            since: First step of the delay; -1 if it is not known.
            once: Whether the delay was that of a single step.
        """
        node, bucket = self._node(worst.rank), columns[worst.column]
        return Straggler(
            COMPUTES_LATE, ranks, node, worst.seconds, length, since, bucket, self._names(bucket), once=once
        )

    def _links_of(self, breakdowns: Sequence[Breakdown], length: float) -> list[Straggler]:
        """Returns the finding about links that are much slower than others, or than before: one, or none.

        It is about the first phase in which all groups' times are known and a link is slow. At the first breakdown that
        shows it this only remembers the phase and the usual time, sets `confirms_link`, which asks for one more
        breakdown, and returns none; it returns the finding as long as the breakdowns after that show the phase slow.

        Args:
            breakdowns: Breakdowns of all ranks.
            length: Length of a step in seconds.
        """
        for phase in range(MOST_PHASES):
            # The rank that entered a phase last has waited for no other one: the least time of a group is the link's.
            fast = {group: min(breakdowns[rank].fast[phase] for rank in group) for group in self._links_of_phase(phase)}
            slow = {group: min(breakdowns[rank].slow[phase] for rank in group) for group in fast}
            if not fast or min(fast.values()) <= 0:
                continue
            known = self._slow_link if self._slow_link is not None and self._slow_link.phase == phase else None
            middle = sorted(slow.values())[(len(slow) - 1) // 2]
            # Compare with the other links of the phase, then with the same ones before.
            found, before = [group for group, each in fast.items() if _is_slow(each, middle, length)], middle
            usual = max(breakdown.usual[phase] for breakdown in breakdowns) if known is None else known.before
            if not found and usual > 0 and _is_slow(min(fast.values()), usual, length, SLOWER_RATIO):
                found, before = list(fast), usual
            if not found:
                if known is not None:
                    self._slow_link = None
                continue
            # Name it only if the next breakdown shows it again.
            if known is None:
                since = int(statistics.median_low(breakdown.since_step for breakdown in breakdowns))
                self._slow_link = known = _SlowLink(phase, since, before)
                self.confirms_link = True
                return []
            members = sorted({rank for group in found for rank in group})
            return [
                Straggler(
                    SLOW_LINK,
                    tuple(self._ranks[rank] for rank in members),
                    " and ".join(dict.fromkeys(self._node(rank) for rank in members)),
                    max(fast[group] for group in found) - before,
                    length,
                    known.since_step,
                    phase=self._phase_words(phase),
                )
            ]
        return []

    def _links_of_phase(self, phase: int) -> list[tuple[int, ...]]:
        """Returns the sets of ranks that wait for each other in a phase of the plan, one for each link to compare.

        For a phase inside the nodes these are the ranks of each node, and none for CPUs, which have no links. For a
        phase between nodes of equal size they are the ranks of one local rank on all nodes, else all ranks.

        Args:
            phase: Index of the phase.
        """
        cluster = self._communicator.cluster
        levels = [level for index, _, level in self._communicator.executor.stats.phase_seconds() if index == phase]
        if any(level == cluster.level_names[0] for level in levels):
            if self._communicator.device.type == "cpu":
                return []
            return [tuple(node) for node in cluster.nodes if len(node) > 1]
        if len({len(node) for node in cluster.nodes}) == 1 and "all ranks" not in levels:
            return [tuple(rail) for rail in zip(*cluster.nodes, strict=True)]
        return [tuple(range(cluster.size))]

    def _phase_words(self, phase: int) -> str:
        """Returns operation and level of a phase, `reduce_scatter intra_node`."""
        keys = self._communicator.executor.stats.phase_seconds()
        return next((f"{op} {level}" for index, op, level in keys if index == phase), f"phase {phase}")

    def _change(self, found: list[Straggler]) -> None:
        """Replaces the findings by `found`, and logs on rank 0 those that are new, and those that are gone."""
        before = {(each.cause, each.ranks): each for each in self.found}
        now = {(each.cause, each.ranks): each for each in found}
        self.found = tuple(
            replace(each, since_step=before[key].since_step) if key in before else each for key, each in now.items()
        )
        for key, each in now.items():
            if key not in before:
                self._log(each)
        for key, each in before.items():
            if key not in now and self._communicator.rank == 0:
                log.info("no longer: %s", each)

    def named(self) -> frozenset[int]:
        """Returns the ranks that are named as late at present (in `found`), by their ranks in the communicator."""
        named = {rank for each in self.found if each.cause == COMPUTES_LATE for rank in each.ranks}
        return frozenset(place for place, rank in enumerate(self._ranks) if rank in named)

    def _log(self, straggler: Straggler) -> None:
        """Logs a finding on rank 0, for all ranks."""
        if self._communicator.rank == 0:
            log.warning("%s", straggler)

    def _node_ranks(self, rank: int) -> tuple[int, ...]:
        cluster = self._communicator.cluster
        return tuple(cluster.ranks(cluster.unit(rank, 0)))

    def _node(self, rank: int) -> str:
        return self._communicator.hostnames[rank]


class StragglerWatch:
    """Straggler detection of one rank. Every rank makes one, and calls `step_ended` at the end of every step.

    Thread safety: none; all methods are for the training thread.

    Args:
        communicator: Communicator of the gradients.
        every: Steps after which a breakdown is sent even if no summary asks for one; more if summaries are further
            apart.
        names: Returns the parameters of a bucket.
        ranks: Number in the default group of each rank of the communicator; messages and reports name it.
    """

    def __init__(self, communicator: Communicator, every: int, names: Names, ranks: Sequence[int]) -> None:
        self._communicator = communicator
        self._every = every
        self._steps = _OwnSteps(communicator)
        self._diagnosis = _Diagnosis(communicator, names, ranks)
        self._pending: tuple[int, NumberExchange, bool, tuple[int, ...]] | None = None
        self._fresh = 0
        self._timed = 0
        self._summarized_at = self._broken_down_at = self._unseen_from = 0
        self._stride = SUMMARY_STEPS
        self._long_step: int | None = None
        self._breakdown_next = False
        self._least_waits: deque[float] = deque(maxlen=USUAL_SUMMARIES)

    @property
    def found(self) -> tuple[Straggler, ...]:
        """Stragglers and slow links as of the last breakdown; the same on all ranks."""
        return self._diagnosis.found

    @property
    def once(self) -> Straggler | None:
        """The rank for which the others waited in the latest single long wait: over 1 s longer than usual, in one step.

        It stays until another one is found; None before the first one.
        """
        return self._diagnosis.once

    def step_ended(self, step: int, buckets: Sequence[Times]) -> None:
        """Notes the end of a step, and, when it is time, begins an exchange with all ranks or reads one begun before.

        All ranks call it at the same point of their sequence of launches. An exchange is read one step after it began,
        on CUDA two; what it still lacks then is waited for.

        Args:
            step: Number of the step, ascending by one.
            buckets: Times of its buckets, in the order in which they arrived.
        """
        # Invariant: all ranks send the same kind of numbers in the same step. What decides about it is the step's
        # number, and numbers that all ranks have received.
        if self._steps.note(step, buckets):
            self._fresh += 1
            self._timed += 1
        if self._pending is not None:
            self._receive(step)
            if self._pending is not None:
                return
        due = self._fresh > 0 and step - self._broken_down_at >= max(self._every, self._stride)
        # Send a breakdown, or a summary if it is time.
        if self._breakdown_next or due:
            self._breakdown_next = False
            self._steps.read()
            self._start(step, self._steps.breakdown(self._long_step).numbers(), breakdown=True)
            self._fresh, self._summarized_at, self._broken_down_at = 0, step, step
        elif self._timed >= WINDOW and self._fresh >= 3 and step - self._summarized_at >= self._stride:
            self._steps.read()
            summary = self._steps.summary(self._unseen_from)
            self._fresh, self._summarized_at, self._unseen_from = 0, step, step
            self._start(step, list(astuple(summary)), breakdown=False)
        elif len(self._steps.unread) >= MOST_UNREAD:
            self._steps.read()

    def _start(self, step: int, numbers: list[float], *, breakdown: bool) -> None:
        """Begins to exchange the numbers of a summary or a breakdown with all ranks; `_receive` reads them later.

        Args:
            step: Number of the step that has ended.
            numbers: This rank's numbers; as many on all ranks.
            breakdown: Whether they are a breakdown's.
        """
        self._pending = step, NumberExchange(self._communicator, numbers), breakdown, self._steps.columns()

    def _receive(self, step: int) -> None:
        """Reads the exchanged numbers one step after they were sent, on all ranks in the same step, and acts on them.

        On CUDA two steps after, when the computing stream has reached the exchange. Breakdowns update the diagnosis;
        summaries decide whether the next step sends a breakdown.

        Args:
            step: Number of the step that has ended.
        """
        assert self._pending is not None
        if step - self._pending[0] <= self._communicator.clock.lag:
            return
        (_, shared, breakdown, columns), self._pending = self._pending, None
        rows = shared.read()
        if rows is None:
            return
        if breakdown:
            long_step, self._long_step = self._long_step, None
            self._diagnosis.update([Breakdown.of(row) for row in rows], columns, long_step)
            return
        summaries = [Summary(*row) for row in rows]
        length = statistics.median(summary.step_seconds for summary in summaries)
        self._stride = max(SUMMARY_STEPS, ceil(SUMMARY_SECONDS / length)) if length > 0 else SUMMARY_STEPS
        longest = max(summaries, key=lambda summary: summary.longest_seconds)
        self._long_step = int(longest.longest_step) if longest.longest_seconds >= LONG_SECONDS else None
        differ = summaries_differ(summaries, self._diagnosis.named())
        explains = self._long_step is not None
        self._breakdown_next = (
            differ or explains or self._waits_grow(summaries, length) or bool(self._diagnosis.suspects)
        )
        self._breakdown_next |= self._diagnosis.confirms_link
        self._diagnosis.confirms_link = False

    def _waits_grow(self, summaries: Sequence[Summary], length: float) -> bool:
        """Returns whether all ranks wait longer than usual, which is a sign of a slow link.

        Args:
            summaries: Summaries of all ranks; the shortest wait among them is kept, as one that is usual from now on.
            length: Length of a step in seconds.
        """
        least = min(summary.wait_seconds for summary in summaries)
        if least < 0:
            return False
        usual = statistics.median(self._least_waits) if self._least_waits else least
        self._least_waits.append(least)
        return _is_slow(least, usual, length)
