"""Measurement of a table's rows: buffers, times and checks of one backend over all sizes. `output.py` prints them.

One clock runs around all iterations, as in nccl-tests, unless -I or -z 3 asks for each iteration's time.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.bench.nccl_tests.backends.backend import Backend, Issue
from gradwire.bench.nccl_tests.checks import Buffers, Case, ResultCheck
from gradwire.bench.nccl_tests.collectives import CollectiveSpec, Counts
from gradwire.bench.nccl_tests.ranks import gather

CHECK_TIMED = 1
"""Index of the check from which the time of all checks is estimated: the second, as the first also allocates memory."""
LONG_CHECKS_SECONDS = 30.0
"""Estimated time of the remaining checks of a half row above which a warning is printed."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Times of single iterations, without those that were skipped.

    Attributes:
        skipped: Number of iterations left out at the start.
        seconds: Seconds per operation of each iteration on its slowest rank, in order.
        by_rank: Seconds per operation of each iteration, for each rank.
    """

    skipped: int
    seconds: tuple[float, ...]
    by_rank: tuple[tuple[float, ...], ...]

    def percentile(self, percent: float) -> float:
        """Returns a percentile of `seconds` by the nearest-rank method.

        Args:
            percent: 0 to 100.
        """
        ordered = sorted(self.seconds)
        return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]

    @property
    def mean(self) -> float:
        """Arithmetic mean of `seconds`."""
        return statistics.fmean(self.seconds)

    @property
    def deviation(self) -> float:
        """Standard deviation of `seconds`, as of a whole population."""
        return statistics.pstdev(self.seconds)

    @property
    def variation(self) -> float:
        """Standard deviation divided by the mean, in percent; 0 if the mean is 0."""
        return 100 * self.deviation / self.mean if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of an operation in one half of a row.

    Attributes:
        seconds: Seconds per operation: rank 0's, or the mean, minimum or maximum over the ranks, as -a says. With -C 1
            processor time on the CPU, and the time to issue on CUDA.
        iterations: Times of single iterations; None without -I.
    """

    seconds: float
    iterations: IterationTimes | None = None


class Timer:
    """Clock for operations, as the options ask for it. All ranks call its methods together.

    Args:
        options: Options of the command line.
        device: Device of the tensors.
        control: gloo group of all ranks, for barriers and for exchanging times.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, control: dist.ProcessGroup) -> None:
        self._iterations: int = options.iters
        self._blocking: int = options.blocking
        self._average: int = options.average
        self._processor_time: bool = bool(options.report_cputime)
        self._graph_launches: int = options.cudagraph
        self._each: bool = bool(options.per_iter_timing)
        self._skip: int = options.per_iter_skip
        self._cuda = device.type == "cuda"
        self._clock = time.process_time if self._processor_time and not self._cuda else time.perf_counter
        self._control = control

    def warm_up(self, issues: Sequence[Issue], iterations: int) -> None:
        """Runs iterations without timing them.

        Args:
            issues: Operations that an iteration issues before it waits: one, or several with -m.
            iterations: Number of iterations.
        """
        for _ in range(iterations):
            _iterate(issues)
        self._finish()

    def time(self, issues: Sequence[Issue]) -> Timing:
        """Runs the iterations, and returns the time of one operation, over the ranks as -a says. Collective.

        Only with -I, and no -G, the result has the times of single iterations, too.

        Args:
            issues: Operations that an iteration issues before it waits: one, or several with -m.
        """
        self._finish()
        dist.barrier(self._control)
        if self._graph_launches:
            return Timing(self._over_ranks(self._replayed(issues)))
        if self._each or self._blocking == 3:
            return self._one_by_one(issues)
        # Ranks leave gloo's barrier tens of microseconds apart; one operation more brings them together.
        _iterate(issues)
        self._finish()
        return Timing(self._over_ranks(self._all_together(issues)))

    def _all_together(self, issues: Sequence[Issue]) -> float:
        """Returns this rank's seconds per operation, with one clock around all iterations."""
        clock = self._clock
        began = clock()
        if len(issues) == 1 and not self._blocking:
            (issue,) = issues
            for _ in range(self._iterations):  # nothing else in here: a collective may take less than a microsecond
                issue().wait()
        else:
            for _ in range(self._iterations):
                _iterate(issues)
                if self._blocking:
                    self._finish()
                    if self._blocking == 1:
                        dist.barrier(self._control)
        issued = clock()
        self._finish()
        ended = issued if self._processor_time else clock()
        return (ended - began) / self._iterations / len(issues)

    def _one_by_one(self, issues: Sequence[Issue]) -> Timing:
        """Times each iteration by itself, and returns the mean of all, over the ranks as -a says. Collective.

        An iteration begins after a barrier, which is not timed, and ends when the device has finished. With -C 1 the
        clock stops before the wait for the device, and on a CPU it is that of the processor time. The times of single
        iterations, without the first ones of -K, are returned too with -I; not with -z 3 alone.
        """
        own = []
        for _ in range(self._iterations):
            dist.barrier(self._control)
            began = self._clock()
            _iterate(issues)
            issued = self._clock()
            self._finish()
            ended = issued if self._processor_time else self._clock()
            own.append((ended - began) / len(issues))
        seconds = torch.tensor(own, dtype=torch.float64, device="cpu")
        everybody = [torch.empty_like(seconds) for _ in range(dist.get_world_size(self._control))]
        dist.all_gather(everybody, seconds, group=self._control)
        kept = [each.tolist()[self._skip :] for each in everybody]
        slowest = tuple(max(seconds) for seconds in zip(*kept, strict=True))
        times = IterationTimes(self._skip, slowest, tuple(map(tuple, kept)))
        return Timing(self._over_ranks(statistics.fmean(own)), times if self._each else None)

    def _replayed(self, issues: Sequence[Issue]) -> float:
        """Returns this rank's seconds per operation in a CUDA graph of all iterations, launched -G times.

        One more launch before them is not timed.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._iterations):
                _iterate(issues)
        graph.replay()
        self._finish()
        dist.barrier(self._control)
        began = time.perf_counter()
        for _ in range(self._graph_launches):
            graph.replay()
        self._finish()
        return (time.perf_counter() - began) / self._graph_launches / self._iterations / len(issues)

    def _finish(self) -> None:
        """Waits for the device: on CUDA a Work's wait() only orders streams."""
        if self._cuda:
            torch.cuda.synchronize()

    def _over_ranks(self, seconds: float) -> float:
        """Returns rank 0's value, or the mean, minimum or maximum of all ranks' values, as -a says."""
        everybody = gather(seconds, self._control)
        figures: Sequence[Callable[[list[float]], float]] = (lambda every: every[0], statistics.fmean, min, max)
        return figures[self._average](everybody)


def _iterate(issues: Sequence[Issue]) -> None:
    for work in [issue() for issue in issues]:
        work.wait()


@dataclass(frozen=True, slots=True)
class RowHalf:
    """One half of a row: the operation out of place, or in place.

    Attributes:
        timing: Time of an operation.
        algbw: Bytes of the row divided by the time, in GB/s.
        busbw: `algbw` times the collective's bus factor, in GB/s: the rate that each link must carry at least.
        wrong: Number of wrong elements on all ranks; None if not checked.
    """

    timing: Timing
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class TableRow:
    """Row of the table: measurements of one size, element type, operation and root.

    Attributes:
        nbytes: Size of the row in bytes: of the input or the output, whichever is larger.
        count: Number in the column `count`, in elements.
        element: Name of the element type.
        operation: Name of the reduction; `none` if the collective does not reduce.
        root: Rank of the root; -1 if the collective has none.
        out_of_place: Measurements with input and output in separate memory.
        in_place: Measurements with input and output in the same memory.
    """

    nbytes: int
    count: int
    element: str
    operation: str
    root: int
    out_of_place: RowHalf
    in_place: RowHalf

    @property
    def wrong(self) -> int:
        """Number of wrong elements of both halves; a half that was not checked counts as 0."""
        return (self.out_of_place.wrong or 0) + (self.in_place.wrong or 0)


class RowRunner:
    """Measurement of one backend over all sizes. All ranks call its methods together.

    Args:
        backend: Backend to measure.
        collective: Collective to run.
        options: Options of the command line.
        device: Device of the tensors.
        control: gloo group of all ranks, for barriers and for exchanging measurements.
        check: Check of the results.
        many_checks: Callback with the seconds that one check took, called once if the remaining checks of a half row
            will take longer than `LONG_CHECKS_SECONDS`.
    """

    def __init__(
        self,
        backend: Backend,
        collective: CollectiveSpec,
        options: argparse.Namespace,
        device: torch.device,
        control: dist.ProcessGroup,
        check: ResultCheck,
        many_checks: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._backend = backend
        self._collective = collective
        self._options = options
        self._device = device
        self._control = control
        self._check = check
        self._many_checks: Callable[[float], None] | None = many_checks
        self._ranks = dist.get_world_size(control)
        self._timer = Timer(options, device, control)

    def rows(self, case: Case, row_sizes: list[int]) -> Iterator[TableRow]:
        """Warms up at every size, then measures and yields one row after the other. Collective.

        Args:
            case: Element type, operation and root.
            row_sizes: Sizes in bytes, ascending; those that give the same numbers of elements make one row.
        """
        counts = list(dict.fromkeys(self._counts(case, nbytes) for nbytes in row_sizes))
        together = self._options.agg_iters
        buffers = [Buffers(counts[-1], case.element, self._backend.rank, self._device) for _ in range(together)]
        for each in counts:
            self._timer.warm_up(self._issues(case, each, buffers, in_place=False), self._options.warmup_iters)
        for each in counts:
            yield self._row(case, each, buffers)

    def _counts(self, case: Case, nbytes: int) -> Counts:
        return self._collective.counts(nbytes // case.element.nbytes, self._ranks, case.element.nbytes)

    def _row(self, case: Case, counts: Counts, buffers: list[Buffers]) -> TableRow:
        nbytes = max(counts.source, counts.output) * case.element.nbytes
        halves = [self._half(case, counts, buffers, nbytes, in_place) for in_place in (False, True)]
        return TableRow(nbytes, counts.shown, case.element.name, case.operation, case.root, halves[0], halves[1])

    def _half(self, case: Case, counts: Counts, buffers: list[Buffers], nbytes: int, in_place: bool) -> RowHalf:
        timing = self._timer.time(self._issues(case, counts, buffers, in_place))
        algbw = nbytes / timing.seconds / 1e9 if timing.seconds else 0.0
        return RowHalf(
            timing,
            algbw,
            algbw * self._collective.bus_factor(self._ranks),
            self._wrong(case, counts, in_place) if self._options.check else None,
        )

    def _wrong(self, case: Case, counts: Counts, in_place: bool) -> int:
        own = 0
        for seed in range(self._options.check):
            began = time.perf_counter()
            own += self._check.wrong(self._backend, self._collective, case, counts, in_place, 2 * seed + in_place)
            took = time.perf_counter() - began
            left = self._options.check - 1 - seed
            if seed == CHECK_TIMED and self._many_checks is not None and took * left > LONG_CHECKS_SECONDS:
                self._many_checks(took)
                self._many_checks = None
        total = torch.tensor([own])
        dist.all_reduce(total, group=self._control)
        return int(total.item())

    def _issues(self, case: Case, counts: Counts, buffers: list[Buffers], in_place: bool) -> list[Issue]:
        """Prepares the operation for each pair of buffers; returns the functions that issue it."""
        return [
            self._collective.prepare(self._backend, *buffer.views(counts, in_place), case.operation, max(case.root, 0))
            for buffer in buffers
        ]
