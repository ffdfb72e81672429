"""Timing: what is run how often, and the figures over iterations and ranks."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradwire.bench.nccl_tests import rows
from gradwire.bench.nccl_tests.checks import cases
from gradwire.bench.nccl_tests.collectives import COLLECTIVES, Counts
from gradwire.bench.nccl_tests.options import parse
from gradwire.bench.nccl_tests.rows import IterationTimes, Timer
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.transport.works import Done


@pytest.fixture
def control() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def calls_of(control: dist.ProcessGroup, *words: str) -> tuple[list[int], Timer]:
    """The buffers that operations were issued on in one timing, and the timer."""
    options = parse(["all_reduce", *words])
    calls: list[int] = []

    def issue(number: int) -> Done:
        calls.append(number)
        return Done()

    timer = Timer(options, torch.device("cpu"), control)
    issues = [partial(issue, number) for number in range(options.agg_iters)]
    timer.warm_up(issues, 2)
    calls.clear()
    timer.time(issues)
    return calls, timer


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (["-n", "7"], [0] * 8),
        (["-n", "3", "-m", "2"], [0, 1] * 4),
        (["-n", "4", "-z", "1"], [0] * 5),
        (["-n", "4", "-z", "3"], [0] * 4),
        (["-n", "5", "-I", "1"], [0] * 5),
        (["-n", "2", "-C", "1"], [0] * 3),
    ],
)
def test_iterations_times_operations_and_one_that_aligns_the_ranks(
    control: dist.ProcessGroup, words: list[str], calls: list[int]
) -> None:
    assert calls_of(control, *words)[0] == calls


def test_skipped_iterations_are_left_out(control: dist.ProcessGroup) -> None:
    timer = Timer(parse(["all_reduce", "-n", "6", "-I", "1", "-K", "2"]), torch.device("cpu"), control)
    timing = timer.time([Done])
    assert timing.iterations is not None
    assert timing.iterations.skipped == 2 and len(timing.iterations.seconds) == 4


@pytest.mark.parametrize("words", [[], ["-z", "1"], ["-z", "3"], ["-I", "1"]])
def test_processor_time_is_what_c_asks_for_however_it_is_timed(
    control: dist.ProcessGroup, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SimpleNamespace(perf_counter=lambda: 0.0, process_time=count().__next__)
    monkeypatch.setattr(rows, "time", clocks)
    timer = Timer(parse(["all_reduce", "-n", "2", "-C", "1", *words]), torch.device("cpu"), control)
    assert timer.time([Done]).seconds > 0


def test_percentiles_are_by_nearest_rank() -> None:
    times = IterationTimes(0, tuple(float(value) for value in range(100, 0, -1)), ())
    assert [times.percentile(percent) for percent in (0, 1, 50, 95, 99, 100)] == [1, 1, 50, 95, 99, 100]
    assert times.mean == 50.5
    assert times.deviation == pytest.approx(28.866, abs=1e-3)
    assert times.variation == pytest.approx(57.16, abs=0.01)


class SlowCheck:
    """Takes half a second of a clock of its own for each check, and finds nothing wrong."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrong(self, *case: object) -> int:
        self.seconds += 0.5
        return 0


@pytest.mark.parametrize(("checks", "told"), [(1, []), (60, []), (100, [0.5])])
def test_who_asks_for_many_checks_hears_once_how_long_one_takes(
    control: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, checks: int, told: list[float]
) -> None:
    check, heard = SlowCheck(), list[float]()
    monkeypatch.setattr(rows, "time", SimpleNamespace(perf_counter=lambda: check.seconds))
    options = parse(["all_reduce", "-c", str(checks)])
    runner = rows.RowRunner(
        None,  # type: ignore[arg-type]  # nothing is issued
        COLLECTIVES["all_reduce"],
        options,
        torch.device("cpu"),
        control,
        check,
        heard.append,
    )
    case = cases(COLLECTIVES["all_reduce"], options, 1)[0]
    for in_place in (False, True):
        assert runner._wrong(case, Counts(1, 1, 1), in_place) == 0
    assert heard == told and check.seconds == checks  # each of them was made, out of place and in place
