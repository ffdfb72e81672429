"""Laws of the search for cuts, on made-up arrivals: all ranks change at the same step, and a file saves the search."""

from datetime import timedelta

import pytest

from gradwire.comms.autotune.cuts import PROFILED_STEPS, STEADY_STEPS, CutFinder, StepSeen, affine, best_cuts
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.fusion import FusionPlan
from gradwire.topology.cluster import LEVEL_NAMES, Level, Link, uniform_cluster
from support.threads import run_ranks

SIZES = (100, 200, 300)
BEGUN = FusionPlan(threshold_nbytes=50)
FOUND = FusionPlan((2, 3), SIZES)
KNOWN = FusionPlan((1, 3), SIZES)


def train(
    size: int, steps: int, *, keeps: bool = False, known: FusionPlan | None = None
) -> tuple[list[list[FusionPlan]], list[list[float]], list[FusionPlan]]:
    """What each rank's steps were cut by, the arrivals that cuts were computed from, and what was kept, over all."""
    store = HashStore()
    asked: list[list[float]] = []
    kept: list[FusionPlan] = []

    def run(rank: int) -> list[FusionPlan]:
        def find(sizes: tuple[int, ...], arrivals: object) -> FusionPlan:
            assert sizes == SIZES and rank == 0 and isinstance(arrivals, list)
            asked.append(arrivals)
            return FOUND

        finder = CutFinder(
            BEGUN,
            find,
            Agreement(store, rank, size, "t", timedelta(seconds=20)),
            keeps=keeps,
            known=known if rank == 0 else None,
            on_computed=kept.append if rank == 0 else lambda plan: None,
        )
        used = []
        for _ in range(steps):
            used.append(finder.plan)
            finder.step_ended(StepSeen(SIZES, (0.0, 0.1 * (1 + rank), 0.5)))
        assert finder.over
        return used

    return run_ranks(size, run), asked, kept


def test_all_ranks_change_once_at_the_same_step_by_the_latest_ranks_arrivals() -> None:
    began = STEADY_STEPS + 1 + PROFILED_STEPS
    ranks, asked, kept = train(3, 20)
    assert ranks == [[BEGUN] * began + [FOUND] * (20 - began)] * 3
    assert asked == [[0.0, pytest.approx(0.3), 0.5]]
    assert kept == [FOUND]


def test_steps_of_other_buckets_are_not_measured() -> None:
    """As if each of the first five steps behind the steady ones had lost a bucket: nothing is left to compute with."""
    finder = CutFinder(BEGUN, lambda *_: FOUND, Agreement(HashStore(), 0, 1, "t", timedelta(seconds=20)))
    arrivals = (0.0, 0.1, 0.5)
    for _ in range(STEADY_STEPS + 1):
        finder.step_ended(StepSeen(SIZES, arrivals))
    for step in range(2 * PROFILED_STEPS):
        finder.step_ended(StepSeen(SIZES, arrivals if step >= PROFILED_STEPS else arrivals[:2]))
        assert finder.over == (step == 2 * PROFILED_STEPS - 1)
    assert finder.plan == FOUND


def test_cuts_of_a_file_are_taken_at_once_on_all_ranks() -> None:
    began = STEADY_STEPS + 1
    ranks, asked, kept = train(2, 12, keeps=True, known=KNOWN)
    assert ranks == [[BEGUN] * began + [KNOWN] * (12 - began)] * 2
    assert not asked and not kept


def test_a_file_without_cuts_is_searched_for_and_filled() -> None:
    ranks, asked, kept = train(2, 12, keeps=True)
    assert all(used[-1] == FOUND for used in ranks)
    assert len(asked) == 1 and kept == [FOUND]


def test_best_cuts_fit_the_buckets() -> None:
    links = (Link(4e-6, 5e9), Link(3e-4, 25e6))
    cluster = uniform_cluster((2, 4), [Level(name, link) for name, link in zip(LEVEL_NAMES, links, strict=False)])
    plan = best_cuts(cluster, "hierarchical", (1 << 20,) * 12, [0.01 * index for index in range(12)])
    assert plan.cuts[-1] == 12 and plan.sizes == (1 << 20,) * 12
    plan.ends_all_reduce([1 << 20], 1 << 20)


def test_a_line_through_two_predictions_gives_back_both() -> None:
    links = (Link(4e-6, 5e9), Link(3e-4, 25e6))
    cluster = uniform_cluster((2, 4), [Level(name, link) for name, link in zip(LEVEL_NAMES, links, strict=False)])
    alpha, beta = affine(cluster, "flat", 8 << 20)
    assert alpha > 0
    assert beta == pytest.approx(2 * 7 / 8 / 25e6, rel=1e-6)
