"""The rows: buffers, check and times of one way over all sizes. No output here, see `report.py`."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.nccl_tests.backends.backend import Issue, Way
from gradwire.bench.nccl_tests.collectives import Collective, Counts
from gradwire.bench.nccl_tests.dtypes import ELEMENT_TYPES, OPERATIONS, ElementType
from gradwire.bench.nccl_tests.measure import Timer, Timing
from gradwire.bench.nccl_tests.verify import Inputs, count_wrong


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a row: out of place, or in place.

    Attributes:
        timing: How long an operation took.
        algbw: Bytes of the row per second, in GB/s.
        busbw: What the slowest link carries, in GB/s.
        wrong: Elements that are wrong, over all ranks; None: not checked.
    """

    timing: Timing
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one collective, element type, operation and root."""

    nbytes: int
    count: int
    element: str
    operation: str
    root: int
    out_of_place: Half
    in_place: Half

    @property
    def wrong(self) -> int:
        """Wrong elements of both halves."""
        return (self.out_of_place.wrong or 0) + (self.in_place.wrong or 0)


@dataclass(frozen=True, slots=True)
class Case:
    """What is the same in a series of rows; `root` is -1 and `operation` `none` where the collective has none."""

    element: ElementType
    operation: str
    root: int


class Check(Protocol):
    """How a result is judged."""

    def wrong(self, way: Way, collective: Collective, case: Case, counts: Counts, in_place: bool, seed: int) -> int:
        """Runs the operation once on inputs of its own and counts this rank's wrong elements."""


class Buffers:
    """Memory for one operation on this rank, out of place and in place.

    Args:
        counts: Of the largest operation.
        element: Of the elements.
        rank: This rank.
        device: Where.
    """

    def __init__(self, counts: Counts, element: ElementType, rank: int, device: torch.device) -> None:
        self._rank = rank
        numel = max(counts.source, counts.output)
        # Zeros: sums of any number of iterations stay finite, and every page exists before the clock starts.
        # Written, not torch.zeros: pages that were never written are all one page, which no cache ever misses.
        self.source, self.output = (torch.empty(numel, dtype=element.torch, device=device) for _ in range(2))
        self.source.view(torch.uint8).zero_()
        self.output.view(torch.uint8).zero_()

    def views(self, counts: Counts, in_place: bool) -> tuple[Tensor, Tensor]:
        """(output, source) of one operation."""
        if not in_place:
            return self.output[: counts.output], self.source[: counts.source]
        first, second = self._rank * counts.output_offset, self._rank * counts.source_offset
        return self.output[first : first + counts.output], self.output[second : second + counts.source]


class ExactCheck:
    """Compares bit by bit with what the inputs must give."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def wrong(self, way: Way, collective: Collective, case: Case, counts: Counts, in_place: bool, seed: int) -> int:
        """See `Check.wrong`."""
        inputs = Inputs(self._ranks, case.element, case.operation, seed)
        buffers = Buffers(counts, case.element, way.rank, self._device)
        output, source = buffers.views(counts, in_place)
        source.copy_(inputs.of(way.rank, 0, counts.source).to(self._device))
        collective.prepare(way, output, source, case.operation, max(case.root, 0))().wait()
        expected = collective.expected(inputs, counts, way.rank, max(case.root, 0))
        return 0 if expected is None else count_wrong(output, expected, inputs)


def cases(collective: Collective, options: argparse.Namespace, ranks: int) -> list[Case]:
    """Every combination of element type, operation and root that the options ask for.

    Raises:
        ValueError: `-r` is no rank.
    """
    if options.root is not None and options.root >= ranks:
        raise ValueError(f"`-r` is {options.root}; wanted a rank below {ranks}, or all")
    elements = list(ELEMENT_TYPES) if options.datatype == "all" else [options.datatype]
    operations = ["none"]
    if collective.reduces:
        operations = list(OPERATIONS) if options.op == "all" else [options.op]
    roots = [-1]
    if collective.rooted:
        roots = list(range(ranks)) if options.root is None else [options.root]
    return [
        Case(ELEMENT_TYPES[element], operation, root)
        for element in elements
        for operation in operations
        for root in roots
    ]


class Table:
    """Runs one way through its sizes; all ranks together.

    Args:
        way: What is measured.
        collective: Which one.
        options: Of the command line.
        device: Of the tensors.
        control: Group of all ranks for barriers and figures.
        check: Judges the results.
    """

    def __init__(
        self,
        way: Way,
        collective: Collective,
        options: argparse.Namespace,
        device: torch.device,
        control: dist.ProcessGroup,
        check: Check,
    ) -> None:
        self._way = way
        self._collective = collective
        self._options = options
        self._device = device
        self._control = control
        self._check = check
        self._ranks = dist.get_world_size(control)
        self._timer = Timer(options, device, control)

    def rows(self, case: Case, row_sizes: list[int]) -> Iterator[Row]:
        """Warms up at every size, then gives one row after the other."""
        counts = list(dict.fromkeys(self._counts(case, nbytes) for nbytes in row_sizes))
        together = self._options.agg_iters
        buffers = [Buffers(counts[-1], case.element, self._way.rank, self._device) for _ in range(together)]
        for each in counts:
            self._timer.warm_up(self._issues(case, each, buffers, in_place=False), self._options.warmup_iters)
        for each in counts:
            yield self._row(case, each, buffers)

    def _counts(self, case: Case, nbytes: int) -> Counts:
        return self._collective.counts(nbytes // case.element.nbytes, self._ranks, case.element.nbytes)

    def _row(self, case: Case, counts: Counts, buffers: list[Buffers]) -> Row:
        nbytes = max(counts.source, counts.output) * case.element.nbytes
        halves = [self._half(case, counts, buffers, nbytes, in_place) for in_place in (False, True)]
        return Row(nbytes, counts.shown, case.element.name, case.operation, case.root, halves[0], halves[1])

    def _half(self, case: Case, counts: Counts, buffers: list[Buffers], nbytes: int, in_place: bool) -> Half:
        timing = self._timer.time(self._issues(case, counts, buffers, in_place))
        algbw = nbytes / timing.seconds / 1e9 if timing.seconds else 0.0
        return Half(
            timing,
            algbw,
            algbw * self._collective.bus_factor(self._ranks),
            self._wrong(case, counts, in_place) if self._options.check else None,
        )

    def _wrong(self, case: Case, counts: Counts, in_place: bool) -> int:
        own = sum(
            self._check.wrong(self._way, self._collective, case, counts, in_place, 2 * seed + in_place)
            for seed in range(self._options.check)
        )
        total = torch.tensor([own])
        dist.all_reduce(total, group=self._control)
        return int(total.item())

    def _issues(self, case: Case, counts: Counts, buffers: list[Buffers], in_place: bool) -> list[Issue]:
        """One for each pair of buffers."""
        return [
            self._collective.prepare(self._way, *buffer.views(counts, in_place), case.operation, max(case.root, 0))
            for buffer in buffers
        ]
