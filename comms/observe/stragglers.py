"""Who is late: names the slowest rank, its node, by how much, since when, in which bucket, and whether it is the link.

An all-reduce equalises the steps of all ranks, so their lengths name nobody. But the hook sees each bucket arrive
before it waits: a rank that is late waits less than the others. What is measured is that wait, from a bucket's arrival
to its reduction, on each rank's own clock. A bucket ends everywhere at nearly the same moment, as no rank has the sum
before the last one has come; so the difference of two ranks' waits is the difference of their arrivals, whatever their
clocks say. Of transfers the time of the rank that entered a phase last counts, which waited for nobody: what is left is
the link.

That moment is not the same where packets are lost: the last message of a bucket may reach a rank a second after the
others have its sum, and then that rank waits longer, arrives later in the next step, and is at no fault in either. Over
many steps this falls on all ranks. A single long wait is therefore not explained by waits, but by what the ranks took
by themselves: each from the end of the step before, on its own clock, to a bucket's arrival.

**What is sent.** In a pulse, every `PULSE_STEPS` steps (in fast steps less often), four numbers a rank; all ranks then
decide alike, from the same numbers, whether to look closer: two to four numbers a bucket, in the step after. Without a
reason every `every` steps. Everything travels in one small all-reduce that no host waits for.

**When a rank is named.** Of the last `WINDOW` steps the rank's waits without the longest, all of them, must be shorter
than the waits of the median rank without the shortest, by more than the threshold T (`SHARE` of a step, at least
`FLOOR_SECONDS`): in at least six of eight steps the rank was later than the median rank by T. Let p be the share of
steps in which it is so by chance; then eight steps give a false alarm with a probability of less than 28 p^6, and two
looks in a row, which are asked for, 784 p^12: at p = 0.1 below 1e-9, at 0.2 3e-6. A rank that is behind by
`STRONG_SHARE` of a step, at least `STRONG_SECONDS`, is named after one look: p is tiny there. It is dropped after two
looks without it. A link is slow by the same comparison of a step's transfers, with those of the other links or of the
steps before, and takes two looks; it is looked for when all ranks wait longer, and what was slow from the first step
on is not found. Inside a node of CPUs there is no link: what is slow there is a busy processor. Source: the tail of the
binomial distribution, C(8, 6) p^6 (1 - p)^2 + ... <= 28 p^6.
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
from gradwire.comms.observe.share import Shared
from gradwire.comms.report import COMPUTES_LATE, SLOW_LINK, Straggler
from gradwire.comms.run.launches import Times

log = logging.getLogger("gradwire")

WINDOW, OUTLIERS = 8, 1
"""Steps that a look is about, and how many of them may stray on either side: a garbage collection, a checkpoint."""

PULSE_STEPS = 12
"""Steps between two pulses. Four late steps may escape the first one; the next, the look, and what it takes to hear of
it make 4 + 12 + 2 steps after which a rank is named at the latest."""

PULSE_SECONDS = 0.24
"""And at least so long: an exchange takes some 0.3 to 0.4 ms of a rank's own thread on a busy machine, and faster steps
should not pay more of it a second than slower ones. Figures: docs/results/diagnosis.md."""

FLOOR_SECONDS, SHARE = 5e-3, 0.05
"""Less than this, of less than this share of a step, is not worth a name: what a scheduler's time slice takes."""

STRONG_SECONDS, STRONG_SHARE = 0.05, 0.25
"""More than both is named after one look."""

LONG_SECONDS = 1.0
"""A single wait so much longer than usual is explained, too."""

SLOW_LINK_RATIO, SLOWER_RATIO = 1.5, 2.0
"""A link is slow where the fastest transfers of the window take so many times as long as the slowest ones of the other
ranks' links, or so many times as long as three quarters of its own before the window."""

USUAL_STEPS = 2 * WINDOW
"""Least number of steps before the window that say what is usual."""

USUAL_PULSES = 8
"""The rank that waits least waits for nobody but the links. Where it waits `SLOW_LINK_RATIO` times as long as in the
median of so many last pulses, that is a reason to look closer."""

MOST_BUCKETS, MANY_RANKS, FEW_BUCKETS = 64, 512, 16
"""Numbers are sent for so many buckets, and for fewer among many ranks; of more, one in several stands for all."""

MOST_PHASES = 6
KEPT_STEPS, MOST_UNREAD = 128, 32

Names = Callable[[int], tuple[str, ...]]
"""Place of a bucket in its step -> names of its parameters."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one rank.

    Attributes:
        step: Its number.
        waits: For each bucket the seconds from its arrival to its reduction.
        phases: For each phase the seconds in it, summed over the step.
        own: For each bucket the seconds from the end of the step before, on this rank, to its arrival; negative where
            that end is not known.
    """

    step: int
    waits: tuple[float, ...]
    phases: tuple[float, ...]
    own: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank says of its last steps, in short.

    Attributes:
        wait_seconds: Median over the window of a step's waits, summed over its buckets; negative where it has too few.
        longest_seconds: By how much the longest single wait since the last pulse exceeded that bucket's median.
        longest_step: In which step.
        step_seconds: How long a step takes.
    """

    wait_seconds: float
    longest_seconds: float
    longest_step: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Look:
    """What a rank says of its last steps, bucket by bucket; buckets are columns.

    Attributes:
        step_seconds: Median.
        since_step: Since when it has waited as it does now.
        fast: Seconds of a step in each phase, the least of the window, outliers left out; negative without a window.
        slow: The most.
        usual: What three quarters of the steps before the window needed no more than; negative without enough of them.
        low: For each column the shortest wait of the window, outliers left out. Empty without a window.
        middle: The median.
        high: The longest, outliers left out.
        once: What the rank took by itself until then in the step that was asked about, see `Sample`; negative where
            nothing was asked.
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
        """The numbers to be shared."""
        phases = (*self.fast, *self.slow, *self.usual)
        return [self.step_seconds, self.since_step, *phases, *self.low, *self.middle, *self.high, *self.once]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Look":
        """The look whose `numbers` these are."""
        head = 2 + 3 * MOST_PHASES
        rest = (len(numbers) - head) // 4
        phases = [tuple(numbers[2 + part * MOST_PHASES : 2 + (part + 1) * MOST_PHASES]) for part in range(3)]
        columns = [tuple(numbers[head + part * rest : head + (part + 1) * rest]) for part in range(4)]
        return cls(numbers[0], numbers[1], *phases, *columns)


@dataclass(frozen=True, slots=True)
class Late:
    """A rank whose gradients come late.

    Attributes:
        rank: Which.
        column: Where the delay begins.
        seconds: How much later than the median rank, where it is most.
        strong: So much that one look is enough.
    """

    rank: int
    column: int
    seconds: float
    strong: bool


@dataclass(frozen=True, slots=True)
class _SlowLink:
    """A phase whose transfers take too long.

    Attributes:
        phase: Its place in the plan.
        since_step: Since when, about.
        before: What a step's transfers took before.
    """

    phase: int
    since_step: int
    before: float


@dataclass(slots=True)
class _Ended:
    """A step that has ended, as it is kept until its numbers are wanted.

    Attributes:
        step: Its number.
        buckets: Times of its buckets.
        previous: Of the last bucket of the step before; None where that was not timed.
        before: Seconds so far in each phase, when its last bucket had arrived.
        after: A step later.
    """

    step: int
    buckets: Sequence[Times]
    previous: Times | None
    before: list[float]
    after: list[float] = field(default_factory=list)


def _median(ordered: Sequence[float]) -> float:
    """The median of ascending numbers: `statistics.median` takes several times as long to find out what they are."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def threshold(step_seconds: float) -> float:
    """Seconds of delay that are worth a name."""
    return max(FLOOR_SECONDS, SHARE * step_seconds)


def late_ranks(looks: Sequence[Look]) -> list[Late]:
    """The ranks that are late in nearly every step of the window, the latest first; the rule is on top of this file.

    Args:
        looks: Of all ranks, in their order.
    """
    step_seconds = statistics.median(look.step_seconds for look in looks)
    least, much = threshold(step_seconds), max(STRONG_SECONDS, STRONG_SHARE * step_seconds)
    columns = min(len(look.low) for look in looks)
    reference = [_reference(looks, column) for column in range(columns)]
    found = []
    for rank, look in enumerate(looks):
        behind = [looks[reference[column]].middle[column] - look.middle[column] for column in range(columns)]
        apart = [looks[reference[column]].low[column] - look.high[column] for column in range(columns)]
        worst = max(range(columns), key=apart.__getitem__, default=None)
        if worst is None or apart[worst] <= least or min(look.low[0], looks[reference[0]].low[0]) < 0:
            continue
        # A rank stays late once it is: the delay begins where it grows most.
        grown = [behind[column] - max(behind[column - 1] if column else 0.0, 0.0) for column in range(worst + 1)]
        column = max(range(worst + 1), key=grown.__getitem__)
        found.append(Late(rank, column, max(behind), apart[worst] > much))
    return sorted(found, key=lambda late: -late.seconds)


def _is_slow(seconds: float, usual: float, length: float, ratio: float = SLOW_LINK_RATIO) -> bool:
    """Whether a step's transfers take much longer than usual."""
    return seconds > ratio * usual and seconds - usual > threshold(length)


def _reference(looks: Sequence[Look], column: int) -> int:
    """The rank in the middle; of two the one that waits."""
    return sorted(range(len(looks)), key=lambda rank: looks[rank].middle[column])[len(looks) // 2]


def late_once(looks: Sequence[Look]) -> Late | None:
    """The rank that the others waited for in the one step that was asked about.

    Args:
        looks: Of all ranks.

    Returns:
        The rank that took so much longer by itself than the one in the middle, of two the faster one; None where no
        rank did: then a link kept them waiting.
    """
    found: Late | None = None
    for column in range(min(len(look.once) for look in looks)):
        own = [look.once[column] for look in looks]
        last, middle = max(own), sorted(own)[(len(own) - 1) // 2]
        if min(own) >= 0 and last - middle > max(LONG_SECONDS, found.seconds * 1.1 if found else 0.0):
            found = Late(own.index(last), column, last - middle, strong=True)
    return found


def pulses_differ(pulses: Sequence[Pulse], known: frozenset[int]) -> bool:
    """Whether to look closer: a rank waits less than the middle one by more than the threshold.

    Args:
        pulses: Of all ranks.
        known: Ranks that are named already: where they, and no others, wait less, there is no news.
    """
    if any(pulse.wait_seconds < 0 for pulse in pulses):
        return False
    least = threshold(statistics.median(pulse.step_seconds for pulse in pulses))
    middle = sorted(pulse.wait_seconds for pulse in pulses)[len(pulses) // 2]
    less = {rank for rank, pulse in enumerate(pulses) if middle - pulse.wait_seconds > least}
    return less != known


class _OwnSteps:
    """What a rank's own steps have taken, and what it says of that to the others.

    Args:
        communicator: Of the gradients.

    Attributes:
        count: Buckets of the step that has ended last.
        unread: Steps whose numbers nobody has wanted yet.
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
        """Notes the end of a step; whether the one before is known by now.

        Args:
            step: Its number.
            buckets: Times of its buckets.
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
            if last is not None:  # only now its buckets have been reduced
                last.after = seconds
                self.unread.append(last)
            previous = last.buckets[-1] if last is not None and last.step == step - 1 else None
            self._last = _Ended(step, buckets, previous, seconds) if timed else None
        return last is not None

    def read(self) -> None:
        """Takes in the steps since the last time: nothing is computed at the end of a step in which nothing is sent."""
        between = self._communicator.clock.between
        keys = list(self._communicator.executor.stats.phase_seconds())
        for ended in self.unread:
            waits = tuple(
                between(each.arrived, each.reduced)
                for each in ended.buckets
                if each.arrived is not None and each.reduced is not None
            )
            if len(waits) < len(ended.buckets):  # of what failed, or is under way
                continue
            end = ended.previous.reduced if ended.previous is not None else None
            own = tuple(
                between(end, each.arrived) if end is not None and each.arrived is not None else -1.0
                for each in ended.buckets
            )
            phases = [0.0] * MOST_PHASES
            before = chain(ended.before, repeat(0.0))  # a phase may be new
            for (place, _, _), seconds, had in zip(keys, ended.after, before, strict=False):
                if place < MOST_PHASES:
                    phases[place] += seconds - had
            self._samples.append(Sample(ended.step, waits, tuple(phases), own))
        self.unread.clear()

    def _window(self) -> list[Sample]:
        """The last steps with as many buckets as the one that has just ended."""
        return [sample for sample in self._samples if len(sample.waits) == self.count][-WINDOW:]

    def columns(self) -> tuple[int, ...]:
        """The buckets that numbers are sent for: all, or the last of each group; the same on all ranks."""
        count = self.count
        most = MOST_BUCKETS if self._communicator.size <= MANY_RANKS else FEW_BUCKETS
        group = max(1, ceil(count / most))
        return tuple(min(first + group, count) - 1 for first in range(0, count, group))

    def pulse(self, since: int) -> Pulse:
        """What is said now and then.

        Args:
            since: The first step whose long waits nobody has been told of.
        """
        window = self._window()
        length = _median(sorted(self._lengths)) if self._lengths else 0.0
        if len(window) < WINDOW:
            return Pulse(-1.0, 0.0, -1.0, length)
        usual = [_median(sorted(column)) for column in zip(*(sample.waits for sample in window), strict=True)]
        longest, step = 0.0, -1
        for sample in self._samples:
            if sample.step >= since and len(sample.waits) == self.count:
                excess = max(map(sub, sample.waits, usual))
                if excess > longest:
                    longest, step = excess, sample.step
        return Pulse(_median(sorted(sum(sample.waits) for sample in window)), longest, step, length)

    def look(self, asked_step: int | None) -> Look:
        """What is said where the others want to know more.

        Args:
            asked_step: The step that they ask about; None where they ask about none.
        """
        window, columns = self._window(), self.columns()
        length = _median(sorted(self._lengths)) if self._lengths else 0.0
        asked = next((sample for sample in self._samples if sample.step == asked_step), None)
        if asked is None or len(asked.waits) != self.count:
            once = tuple(-1.0 for _ in columns)
        else:
            once = tuple(asked.own[column] for column in columns)
        none = tuple(-1.0 for _ in columns)
        if len(window) < WINDOW:
            unknown = (-1.0,) * MOST_PHASES
            return Look(length, -1.0, unknown, unknown, unknown, none, none, none, once)
        waits = [sorted(sample.waits[column] for sample in window) for column in columns]
        phases = [sorted(seconds) for seconds in zip(*(each.phases for each in window), strict=True)]
        return Look(
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
        """Seconds of a step in each phase that three quarters of the steps before the window did not exceed."""
        before = [sample for sample in self._samples if len(sample.waits) == self.count][:-WINDOW]
        if len(before) < USUAL_STEPS:
            return (-1.0,) * MOST_PHASES
        ordered = (sorted(seconds) for seconds in zip(*(each.phases for each in before), strict=True))
        return tuple(each[3 * len(each) // 4] for each in ordered)

    def _since(self) -> int:
        """The first step since when this rank has waited as it does now, as far back as is known."""
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


class _Judge:
    """What the looks of all ranks mean; the same on every rank.

    Args:
        communicator: Of the gradients.
        names: What a bucket holds.
        ranks: In the default group, of all ranks.

    Attributes:
        found: What the last look found.
        once: The last single long wait.
        suspects: Ranks that were late in the last look, and are to be looked at once more.
        confirms_link: Whether a link is to be looked at once more.
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

    def judge(self, looks: Sequence[Look], columns: tuple[int, ...], asked: int | None) -> None:
        """Draws the conclusion.

        Args:
            looks: Of all ranks.
            columns: The buckets that they are of.
            asked: The step that was asked about; None where none was.
        """
        length = statistics.median(look.step_seconds for look in looks)
        repeated = self.once is not None and self.once.since_step == asked
        if asked is not None and not repeated and (late := late_once(looks)) is not None:
            self.once = self._late((self._ranks[late.rank],), late, columns, length, asked, once=True)
            self._say(self.once)
        if any(not look.low or look.low[0] < 0 for look in looks):
            return
        late_now = late_ranks(looks)
        named = self.named()
        sure = [late for late in late_now if late.strong or late.rank in self.suspects | named]
        self.suspects = frozenset(late.rank for late in late_now) - {late.rank for late in sure}
        found = self._stragglers(sure, looks, columns, length)
        if not late_now:
            found += self._links_of(looks, length)
        if not found and self.found:
            self._missed += 1
            if self._missed < 2:
                self.suspects |= named
                return
        self._missed = 0
        self._change(found)

    def _stragglers(
        self, late: Sequence[Late], looks: Sequence[Look], columns: tuple[int, ...], length: float
    ) -> list[Straggler]:
        """One for each node that has late ranks."""
        since = [look.since_step for rank, look in enumerate(looks) if rank not in {each.rank for each in late}]
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
        node, bucket = self._node(worst.rank), columns[worst.column]
        return Straggler(
            COMPUTES_LATE, ranks, node, worst.seconds, length, since, bucket, self._names(bucket), once=once
        )

    def _links_of(self, looks: Sequence[Look], length: float) -> list[Straggler]:
        """The links on which a step's transfers take much longer than on others, or than they did."""
        for phase in range(MOST_PHASES):
            # A phase's time of the rank that came last holds no wait for another one.
            fast = {group: min(looks[rank].fast[phase] for rank in group) for group in self._links_of_phase(phase)}
            slow = {group: min(looks[rank].slow[phase] for rank in group) for group in fast}
            if not fast or min(fast.values()) <= 0:
                continue
            known = self._slow_link if self._slow_link is not None and self._slow_link.phase == phase else None
            middle = sorted(slow.values())[(len(slow) - 1) // 2]
            found, before = [group for group, each in fast.items() if _is_slow(each, middle, length)], middle
            usual = max(look.usual[phase] for look in looks) if known is None else known.before
            if not found and usual > 0 and _is_slow(min(fast.values()), usual, length, SLOWER_RATIO):
                found, before = list(fast), usual
            if not found:
                if known is not None:
                    self._slow_link = None
                continue
            if known is None:  # once more, then it is believed
                since = int(statistics.median_low(look.since_step for look in looks))
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
        """The sets of ranks that wait for each other in a phase: a node's, or those of one place in every node.

        None inside nodes of CPUs.
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
        keys = self._communicator.executor.stats.phase_seconds()
        return next((f"{op} {level}" for index, op, level in keys if index == phase), f"phase {phase}")

    def _change(self, found: list[Straggler]) -> None:
        """Takes up a new conclusion; says what is new in it."""
        before = {(each.cause, each.ranks): each for each in self.found}
        now = {(each.cause, each.ranks): each for each in found}
        self.found = tuple(
            replace(each, since_step=before[key].since_step) if key in before else each for key, each in now.items()
        )
        for key, each in now.items():
            if key not in before:
                self._say(each)
        for key, each in before.items():
            if key not in now and self._communicator.rank == 0:
                log.info("no longer: %s", each)

    def named(self) -> frozenset[int]:
        """The ranks that the last look found late, by their place in the group."""
        named = {rank for each in self.found if each.cause == COMPUTES_LATE for rank in each.ranks}
        return frozenset(place for place, rank in enumerate(self._ranks) if rank in named)

    def _say(self, straggler: Straggler) -> None:
        """Rank 0 logs for all."""
        if self._communicator.rank == 0:
            log.warning("%s", straggler)

    def _node_ranks(self, rank: int) -> tuple[int, ...]:
        cluster = self._communicator.cluster
        return tuple(cluster.ranks(cluster.unit(rank, 0)))

    def _node(self, rank: int) -> str:
        return self._communicator.hostnames[rank]


class StragglerWatch:
    """One rank's part in finding out who is late. Every rank makes one, and tells it of every step.

    Args:
        communicator: Of the gradients.
        every: Steps between two looks that have no reason.
        names: What a bucket holds.
        ranks: In the default group, of all ranks: what messages and reports name.
    """

    def __init__(self, communicator: Communicator, every: int, names: Names, ranks: Sequence[int]) -> None:
        self._communicator = communicator
        self._every = every
        self._steps = _OwnSteps(communicator)
        self._judge = _Judge(communicator, names, ranks)
        self._pending: tuple[int, Shared, bool, tuple[int, ...]] | None = None
        self._fresh = 0
        self._timed = 0
        self._pulsed_at = self._looked_at = self._unseen_from = 0
        self._stride = PULSE_STEPS
        self._asked_step: int | None = None
        self._look_next = False
        self._least_waits: deque[float] = deque(maxlen=USUAL_PULSES)

    @property
    def found(self) -> tuple[Straggler, ...]:
        """What the last look found; the same on all ranks."""
        return self._judge.found

    @property
    def once(self) -> Straggler | None:
        """The last single long wait."""
        return self._judge.once

    def step_ended(self, step: int, buckets: Sequence[Times]) -> None:
        """Notes the end of a backward pass; all ranks, at the same point of the sequence of launches.

        Args:
            step: Its number, ascending by one.
            buckets: Times of its buckets, in the order in which they arrived.
        """
        if self._steps.note(step, buckets):
            self._fresh += 1
            self._timed += 1
        if self._pending is not None:
            self._hear(step)
            if self._pending is not None:
                return
        due = self._fresh > 0 and step - self._looked_at >= max(self._every, self._stride)
        if self._look_next or due:
            self._look_next = False
            self._steps.read()
            self._start(step, self._steps.look(self._asked_step).numbers(), look=True)
            self._fresh, self._pulsed_at, self._looked_at = 0, step, step
        elif self._timed >= WINDOW and self._fresh >= 3 and step - self._pulsed_at >= self._stride:
            self._steps.read()
            pulse = self._steps.pulse(self._unseen_from)
            self._fresh, self._pulsed_at, self._unseen_from = 0, step, step
            self._start(step, list(astuple(pulse)), look=False)
        elif len(self._steps.unread) >= MOST_UNREAD:
            self._steps.read()

    def _start(self, step: int, numbers: list[float], *, look: bool) -> None:
        self._pending = step, Shared(self._communicator, numbers), look, self._steps.columns()

    def _hear(self, step: int) -> None:
        """Takes in what was shared a step before; on a device two, when the stream that computes has passed it."""
        assert self._pending is not None
        if step - self._pending[0] <= self._communicator.clock.lag:
            return
        (_, shared, look, columns), self._pending = self._pending, None
        rows = shared.read()
        if rows is None:
            return
        if look:
            asked, self._asked_step = self._asked_step, None
            self._judge.judge([Look.of(row) for row in rows], columns, asked)
            return
        pulses = [Pulse(*row) for row in rows]
        length = statistics.median(pulse.step_seconds for pulse in pulses)
        self._stride = max(PULSE_STEPS, ceil(PULSE_SECONDS / length)) if length > 0 else PULSE_STEPS
        longest = max(pulses, key=lambda pulse: pulse.longest_seconds)
        self._asked_step = int(longest.longest_step) if longest.longest_seconds >= LONG_SECONDS else None
        differ = pulses_differ(pulses, self._judge.named())
        asked = self._asked_step is not None
        self._look_next = differ or asked or self._waits_grow(pulses, length) or bool(self._judge.suspects)
        self._look_next |= self._judge.confirms_link
        self._judge.confirms_link = False

    def _waits_grow(self, pulses: Sequence[Pulse], length: float) -> bool:
        """Whether links seem to have become slow."""
        least = min(pulse.wait_seconds for pulse in pulses)
        if least < 0:
            return False
        usual = statistics.median(self._least_waits) if self._least_waits else least
        self._least_waits.append(least)
        return _is_slow(least, usual, length)
