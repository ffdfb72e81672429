"""Who is named as late, over simulated jobs: clocks differ, looks are 20 ms apart, compute times scatter."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from gradwire.comms.watch.activity import QUEUE
from gradwire.comms.watch.collective import IssuedCollective
from gradwire.comms.watch.rank import RankStatus
from gradwire.comms.watch.report import WatchReport, late_in_words
from gradwire.comms.watch.stragglers import StragglerFinder, WatchStraggler, longest_waited_in
from support.watched import Collective, SimulatedJob

DATA_PARALLEL = [("default", (0, 1, 2, 3))] * 4
TENSOR_AND_DATA: list[Collective] = [("tp0", (0, 1)), ("tp1", (2, 3)), ("dp0", (0, 2)), ("dp1", (1, 3))]
PIPELINE: list[Collective] = [("stage01", (0, 1)), ("stage12", (1, 2)), ("stage23", (2, 3))]


def compute_times(
    size: int, base: float, scatter: float, seed: int, late: int | None = None, delay: float = 0.0, since: int = 0
) -> Iterator[Sequence[float]]:
    drawn = random.Random(seed)
    for step in itertools.count():
        row = [base * (1 + drawn.uniform(0, scatter)) for _ in range(size)]
        if late is not None and step >= since:
            row[late] += delay
        yield row


def first_named(
    step: Sequence[Collective], times: Iterator[Sequence[float]], steps: int, transfer_seconds: float = 0.002
) -> tuple[int | None, list[WatchStraggler]]:
    """The step in which somebody is named first, and who."""
    job = SimulatedJob(4, step, transfer_seconds)
    lateness = StragglerFinder(job.members)
    for number, statuses in enumerate(job.steps(itertools.islice(times, steps))):
        if statuses is not None and (found := lateness.receive(statuses)):
            return number, found
    return None, []


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("step", [DATA_PARALLEL, TENSOR_AND_DATA, PIPELINE], ids=["dp", "tp-dp", "pipeline"])
@pytest.mark.parametrize("base", [0.02, 0.1])
def test_a_delay_of_200_ms_is_named_within_20_steps(step: Sequence[Collective], late: int, base: float) -> None:
    for seed in range(5):
        number, found = first_named(step, compute_times(4, base, 0.2, seed, late, 0.2, since=30), 51)
        assert number is not None and 30 <= number, (seed, number)
        assert [each.rank for each in found] == [late], (seed, found)


@pytest.mark.parametrize("step", [DATA_PARALLEL, TENSOR_AND_DATA, PIPELINE], ids=["dp", "tp-dp", "pipeline"])
@pytest.mark.parametrize(("delay", "suspected"), [(0.15, [2]), (0.0, [])])
def test_a_job_that_ends_too_early_has_suspects_and_is_not_decided(
    step: Sequence[Collective], delay: float, suspected: list[int]
) -> None:
    """A rank that is 150 ms late in steps of a second, for which 13 s are too short to name it."""
    for seed in range(5):
        job = SimulatedJob(4, step)
        lateness, last = StragglerFinder(job.members), None
        for statuses in job.steps(itertools.islice(compute_times(4, 1.0, 0.02, seed, 2, delay), 11)):
            if statuses is not None:
                assert not lateness.receive(statuses)
                last = statuses
        assert last is not None and not lateness.decided
        assert [each.rank for each in lateness.suspects(last)] == suspected, seed


def test_a_report_does_not_claim_what_too_few_steps_cannot_show() -> None:
    short = WatchReport(13.0)
    assert "too little was seen to say that no rank was late, nothing hung" in str(short)
    (said,) = short.suspects = [late_in_words(WatchStraggler(2, "default", 0.12, (0, 1, 3)), "node1", "may be late")]
    assert said in str(short) and "no rank was late, " not in str(short)
    assert "no rank was late, nothing hung" in str(WatchReport(60.0, decided=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_late_rank_is_named_where_the_others_always_have_something_under_way(seed: int) -> None:
    """They issue the next collectives, asynchronously, milliseconds after the last ones: no look sees them idle."""
    number, _ = first_named(DATA_PARALLEL[:1], compute_times(4, 0.003, 1.0, seed), 2000, transfer_seconds=0.05)
    assert number is None
    number, found = first_named(DATA_PARALLEL[:1], compute_times(4, 0.003, 1.0, seed, 2, 0.25), 40)
    assert number is not None and [each.rank for each in found] == [2]


def test_a_small_delay_in_long_steps_is_named_too() -> None:
    number, found = first_named(DATA_PARALLEL, compute_times(4, 0.3, 0.02, 0, 2, 0.05), 60)
    assert number is not None and [each.rank for each in found] == [2]
    assert 0.05 < found[0].seconds < 0.25


@pytest.mark.parametrize("step", [DATA_PARALLEL, TENSOR_AND_DATA], ids=["dp", "tp-dp"])
def test_nobody_is_named_in_ten_thousand_healthy_steps(step: Sequence[Collective]) -> None:
    number, found = first_named(step, compute_times(4, 0.03, 0.5, 7), 10_000)
    assert number is None, (number, found)


def test_what_a_late_rank_does_longer_than_the_others_is_said() -> None:
    _, found = first_named(DATA_PARALLEL, compute_times(4, 0.05, 0.1, 1, 3, 0.2), 60)
    assert found[0].busy_with == "the forward pass"
    assert found[0].waiting == (0, 1, 2)


def test_a_rank_that_recovers_is_no_longer_late() -> None:
    job = SimulatedJob(4, DATA_PARALLEL)
    lateness = StragglerFinder(job.members)
    times = itertools.chain(
        itertools.islice(compute_times(4, 0.05, 0.1, 1, 3, 0.2), 30),
        itertools.islice(compute_times(4, 0.05, 0.1, 2), 90),
    )
    found = [lateness.receive(statuses) for statuses in job.steps(times) if statuses is not None]
    assert any(found) and not found[-1]


@pytest.mark.parametrize("stale", [0.0, 0.6])
def test_who_has_waited_for_a_late_rank_is_not_named_when_that_one_recovers(stale: float) -> None:
    """Also where the statuses of some ranks come late, as on a busy machine."""
    drawn = random.Random(3)
    late_in = [rank for rank in (1, 3, 0, 2, 1) for _ in range(60)]
    times = [
        [0.05 + drawn.expovariate(1 / 0.03) + 0.2 * (rank == late and step % 60 < 20) for rank in range(4)]
        for step, late in enumerate(late_in)
    ]
    job = SimulatedJob(4, TENSOR_AND_DATA)
    lateness, heard, named = StragglerFinder(job.members), dict[int, RankStatus](), set[int]()
    for late, statuses in zip(late_in, job.steps(iter(times)), strict=True):
        if statuses is None:
            continue
        heard = {rank: heard[rank] if rank in heard and drawn.random() < stale else statuses[rank] for rank in statuses}
        now = {each.rank for each in lateness.receive(heard)}
        assert now <= {late} | named & now, (late, now)
        named = now
    assert named <= {1}


def test_a_rank_that_waits_for_a_processor_is_said_to() -> None:
    job = SimulatedJob(4, DATA_PARALLEL)
    lateness, waited = StragglerFinder(job.members), 0.0
    found: list[WatchStraggler] = []
    for statuses in job.steps(itertools.islice(compute_times(4, 0.05, 0.1, 1, 3, 0.2), 60)):
        if statuses is not None:
            waited += 0.3
            queues = {rank: {QUEUE: waited if rank == 3 else 0.0} for rank in statuses}
            found = lateness.receive(
                {r: replace(status, activity={**status.activity, **queues[r]}) for r, status in statuses.items()}
            )
    assert [(each.rank, each.busy_with) for each in found] == [(3, QUEUE)]


def test_the_collective_that_is_waited_in_longest_is_found_by_what_it_carries() -> None:
    """Those of one bucket count together; what is under way, and what the late rank says, do not."""

    def step(number: int, head: float, body: float) -> list[IssuedCollective]:
        began = 10.0 * number
        return [
            IssuedCollective(2 * number, "all_reduce of [9] Float", "train.py:3", began, began + head, "head"),
            IssuedCollective(2 * number + 1, "all_reduce of [4] Float", "train.py:3", began, began + body, "body"),
        ]

    waits = [*step(0, 0.3, 0.1), *step(1, 0.3, 0.1), IssuedCollective(4, "barrier", "train.py:9", 20.0, 20.5)]
    late = [*step(0, 0.0, 9.0), IssuedCollective(2, "broadcast", None, 10.0)]
    found = longest_waited_in({0: waits, 1: waits, 2: late}, (0, 1))
    assert found == IssuedCollective(0, "all_reduce of [9] Float", "train.py:3", holds="head")
    assert longest_waited_in({2: late[2:]}, (2, 3)) is None
