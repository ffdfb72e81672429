"""Laws of who is named late: whoever is, soon and with the bucket; nobody else, however much times vary by chance.

Most of it on made-up times, whose ranks share numbers at once; that it holds for real ranks is shown with threads.
"""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gradwire.comms.observe import stragglers
from gradwire.comms.observe.stragglers import SUMMARY_STEPS, WINDOW, Breakdown, StragglerWatch, late_ranks
from gradwire.comms.report import COMPUTES_LATE, SLOW_LINK, Straggler
from gradwire.comms.run.all_reduces import Times
from gradwire.comms.streams import HostClock
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link
from support.observed import PARAMETERS, Steps, on_ranks

SOON = 20
"""Steps within which a rank is to be named."""

Arrivals = Callable[[int, int, int], float]
"""From step, rank and bucket to the seconds that the rank computes for it."""


class Job:
    """Ranks on nodes of two, whose times are made up; all in one thread."""

    def __init__(self, size: int = 4, buckets: int = 3) -> None:
        self.size, self.buckets, self.steps, self.now = size, buckets, 0, 0.0
        link = Link(alpha_seconds=1e-5, bytes_per_second=1e9)
        places = tuple((rank // 2,) for rank in range(size))
        cluster = Cluster(places, (Level(LEVEL_NAMES[0], link), Level(LEVEL_NAMES[1], link)))
        self.phases: list[dict[tuple[int, str, str], tuple[float, int, int]]] = [{} for _ in range(size)]
        self.released = [0.0] * size
        self.shared: dict[int, list[list[float]]] = {}
        self.values = 0
        self.watches = [
            StragglerWatch(self._communicator(rank, cluster), 50, lambda index: (f"p{index}",), range(size))
            for rank in range(size)
        ]

    def _communicator(self, rank: int, cluster: Cluster) -> Any:
        stats = SimpleNamespace(
            timing=True,
            phase_seconds=lambda: dict(self.phases[rank]),
            seconds_of_phases=lambda: [seconds for seconds, _, _ in self.phases[rank].values()],
        )
        hostnames = [f"node{rank // 2}" for rank in range(self.size)]
        return SimpleNamespace(
            rank=rank,
            size=self.size,
            device=SimpleNamespace(type="cpu"),
            executor=SimpleNamespace(stats=stats),
            clock=HostClock(),
            cluster=cluster,
            hostnames=hostnames,
        )

    def share(self, communicator: Any, values: Sequence[float]) -> Any:
        """In place of `NumberExchange`: ranks take turns, so all have sent their numbers before one reads."""
        rows = self.shared.setdefault(self.steps, [])
        rows.append(list(values))
        self.values += len(values)
        return SimpleNamespace(read=lambda: rows if len({len(row) for row in rows}) == 1 else pytest.fail("lengths"))

    def step(
        self,
        computes: Arrivals,
        transfer: float = 1e-3,
        phases: Sequence[float] = (),
        lost: Callable[[int, int], float] = lambda step, rank: 0.0,
    ) -> None:
        """A step in which a bucket is reduced `transfer` seconds after its last arrival and after the one before it.

        The last bucket's last message comes to a rank `lost` seconds later than to the others.
        """
        self.steps += 1
        times: list[list[Times]] = [[] for _ in range(self.size)]
        at, ended = list(self.released), 0.0
        for bucket in range(self.buckets):
            at = [begun + computes(self.steps, rank, bucket) for rank, begun in enumerate(at)]
            ended = max(max(at), ended) + transfer
            for rank in range(self.size):
                times[rank].append(Times(at[rank], ended))
        self.released = [ended + lost(self.steps, rank) for rank in range(self.size)]
        for rank, own in enumerate(times):
            own[-1] = Times(own[-1].arrived, self.released[rank])
        self.now = max(self.released)
        for rank, seconds in enumerate(phases):
            key = (1, "all_reduce", LEVEL_NAMES[1])
            had = self.phases[rank].get(key, (0.0, 0, 0))
            self.phases[rank][key] = had[0] + seconds, had[1] + 1, 0
        with (
            patch.object(stragglers, "NumberExchange", self.share),
            patch("gradwire.comms.observe.stragglers.time.perf_counter", lambda: self.now),
        ):
            for watch, own in zip(self.watches, times, strict=True):
                watch.step_ended(self.steps, own)
        assert all(watch.found == self.watches[0].found for watch in self.watches)  # all ranks conclude alike

    @property
    def found(self) -> tuple[Straggler, ...]:
        return self.watches[0].found


def evenly(step: int, rank: int, bucket: int) -> float:
    """30 ms a bucket on every rank, a little more on some."""
    return 0.03 + 1e-4 * rank


@pytest.mark.parametrize("begins", range(40, 40 + SUMMARY_STEPS))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_late_rank_is_named_soon_whenever_it_begins(size: int, begins: int) -> None:
    job, rank, late_bucket = Job(size), size - 1, begins % 3

    def computes(step: int, at: int, bucket: int) -> float:
        return evenly(step, at, bucket) + (0.2 if step >= begins and (at, bucket) == (rank, late_bucket) else 0.0)

    while not job.found and job.steps < begins + SOON:
        job.step(computes)
    (found,) = job.found
    assert (found.cause, found.ranks, found.node) == (COMPUTES_LATE, (rank,), f"node{rank // 2}")
    assert (found.bucket, found.parameters) == (late_bucket, (f"p{late_bucket}",))
    assert found.seconds == pytest.approx(0.2, abs=2e-3)
    assert found.since_step == begins


def test_a_small_delay_takes_two_looks_and_its_end_is_noticed() -> None:
    job = Job(4)
    for _ in range(20):
        job.step(evenly)
    for _ in range(2 * SUMMARY_STEPS + SOON):
        job.step(lambda step, rank, bucket: evenly(step, rank, bucket) + (0.012 if rank == 1 else 0.0))
    assert [found.ranks for found in job.found] == [(1,)]
    for _ in range(60):
        job.step(evenly)
    assert not job.found


def test_a_whole_node_that_is_late_is_one_finding() -> None:
    job = Job(6)
    for _ in range(SOON):
        job.step(lambda step, rank, bucket: 0.03 + (0.1 if rank in (2, 3) and bucket == 1 else 0.0))
    (found,) = job.found
    assert (found.ranks, found.node, found.bucket) == ((2, 3), "node1", 1)


@pytest.mark.parametrize("long", range(30, 30 + SUMMARY_STEPS))
def test_one_long_wait_is_explained_and_names_nobody_for_good(long: int, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    for _ in range(60):
        job.step(lambda step, rank, bucket: 3.0 if (step, rank, bucket) == (long, 2, 1) else 0.03)
    once = job.watches[0].once
    assert once is not None
    assert (once.ranks, once.since_step, once.bucket) == ((2,), long, 1)
    assert once.seconds == pytest.approx(2.97, abs=0.01)
    assert not job.found
    assert [f"gradwire: {once}"] == [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("long", range(30, 30 + SUMMARY_STEPS))
def test_a_message_that_comes_late_names_nobody(size: int, long: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its packets were lost several times: the rank goes on 3 s after the others, which wait for it a step later."""
    job = Job(size)
    for _ in range(60):
        job.step(evenly, lost=lambda step, rank: 3.0 if (step, rank) == (long, size - 1) else 0.0)
    assert [watch.once for watch in job.watches] == [None] * size
    assert not job.found
    assert not caplog.records


@pytest.mark.parametrize("rail_only", [True, False], ids=["one rail", "all links"])
def test_a_slow_link_is_no_late_rank(rail_only: bool) -> None:
    """Rank 1's rail (ranks 1 and 3), or every link, takes three times as long from step 60 on."""
    job, begins = Job(4), 60
    for _ in range(begins):
        job.step(evenly, transfer=0.01, phases=[0.03] * 4)
    assert not job.found
    for _ in range(3 * SUMMARY_STEPS + 4):
        phases = [0.03, 0.09, 0.03, 0.09] if rail_only else [0.09] * 4
        job.step(evenly, transfer=0.03, phases=phases)
    (found,) = job.found
    assert (found.cause, found.phase) == (SLOW_LINK, f"all_reduce {LEVEL_NAMES[1]}")
    assert found.ranks == ((1, 3) if rail_only else (0, 1, 2, 3))
    assert found.seconds == pytest.approx(0.06, abs=1e-3)
    assert begins <= found.since_step <= begins + 1
    for _ in range(150):  # however long that lasts, it is not taken for what is usual
        job.step(evenly, transfer=0.03, phases=phases)
    (still,) = job.found
    assert (still.cause, still.ranks, still.since_step) == (found.cause, found.ranks, found.since_step)
    assert still.seconds == pytest.approx(found.seconds, abs=1e-3)
    for _ in range(130):
        job.step(evenly, transfer=0.01, phases=[0.03] * 4)
    assert not job.found


NOISES: dict[str, Callable[[random.Random], float]] = {
    "even": lambda _: 0.0,
    "jitter of a tenth": lambda draw: draw.gauss(0.0, 0.003),
    "heavy tail": lambda draw: 0.002 * draw.paretovariate(1.5),
    "pauses": lambda draw: 0.5 if draw.random() < 0.03 else 0.0,
}


@pytest.mark.parametrize("noise", NOISES)
def test_chance_names_nobody(noise: str, steps: int = 600) -> None:
    """`bench.studies.stragglers alarms` goes through ten thousand steps of each."""
    job, draw = Job(4), random.Random(noise)
    for _ in range(steps):
        job.step(lambda step, rank, bucket: max(evenly(step, rank, bucket) + NOISES[noise](draw), 0.0))
        assert not job.found


def test_what_is_shared_is_little() -> None:
    """Of a quiet job: four numbers a rank in a summary, and a breakdown every fifty steps."""
    job, size, steps = Job(8), 8, 500
    for _ in range(steps):
        job.step(evenly)
    one = Breakdown(0, 0, *[(0,) * stragglers.MOST_PHASES] * 3, *[(0,) * 3] * 4)
    assert job.values <= size * (steps // SUMMARY_STEPS * 4 + steps // 50 * len(one.numbers()))


def test_fast_steps_are_asked_about_less_often() -> None:
    job = Job(4)
    for _ in range(600):
        job.step(lambda step, rank, bucket: 2e-4, transfer=1e-4)
    per_second = len(job.shared) / job.now
    assert per_second < 1 / stragglers.SUMMARY_SECONDS + 2  # and the first two


def test_a_rank_needs_more_than_a_long_wait_of_the_others_to_be_named() -> None:
    """In half of the window's steps is not enough."""
    breakdowns = []
    for rank in range(4):
        waits = [0.0 if rank == 1 and step % 2 else 0.2 for step in range(WINDOW)]
        low, high = sorted(waits)[1], sorted(waits)[-2]
        none = (-1.0,) * stragglers.MOST_PHASES
        breakdowns.append(Breakdown(1.0, 0.0, none, none, none, (low,), (sum(waits) / WINDOW,), (high,), (-1.0,)))
    assert not late_ranks(breakdowns)


@pytest.mark.parametrize(("nodes", "compressor"), [("aabb", "int8"), ("aaaabbbb", None)])
def test_real_ranks_name_the_late_one(nodes: str, compressor: str | None) -> None:
    """60 ms of the 200 that the law is for. It takes twelve steps; more where the machine has other things to do."""

    def body(steps: Steps) -> tuple[Straggler, ...]:
        found: tuple[Straggler, ...] = ()
        while not found and steps.steps < 10 * SOON:
            steps.step(lambda index: 0.06 if steps.communicator.rank == 2 and index == 1 else 2e-3)
            report = steps.observer.add_to(steps.communicator.report(steps.steps))
            found = report.stragglers  # the same on all ranks after the same step
            assert report.buckets == steps.steps * len(PARAMETERS)  # what the ranks tell each other is not counted
            assert len(report.plans) == 1
        return found

    results = on_ranks(nodes, body, compressor=compressor)
    assert len(set(results)) == 1
    (found,) = results[0]
    assert (found.cause, found.ranks, found.bucket) == (COMPUTES_LATE, (2,), 1)
    assert found.node == f"node-{nodes[2]}"
    assert found.parameters == ("layers.1.mlp.weight",)
