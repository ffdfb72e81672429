"""Laws of the tuner, on made-up step times: all ranks try the same, the best wins, none ends slower than it began."""

import random
from datetime import timedelta

import pytest

from gradwire.comms.autotune.profile import TunerSetting
from gradwire.comms.autotune.propose import affine, propose
from gradwire.comms.autotune.tune import Budget, StepSeen, Tuner
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.topology.cluster import LEVEL_NAMES, Level, Link, uniform_cluster
from support.threads import run_ranks

SIZES = (100, 200, 300)
BUDGET = Budget(listen_steps=10)
INCUMBENT = TunerSetting("as begun", (), (), 0, "hierarchical", 0)
OTHERS = [TunerSetting(f"number {index}", (index,), SIZES, 0, "hierarchical", 0) for index in (1, 2, 3)]


def train(
    seconds: dict[str, float],
    steps: int,
    noise: float = 0.0,
    size: int = 2,
    slow_rank: dict[str, float] | None = None,
    drift_at: int = 10**9,
    known: TunerSetting | None = None,
    trials: bool = True,
) -> list[tuple[list[str], Tuner]]:
    store = HashStore()

    def run(rank: int) -> tuple[list[str], Tuner]:
        tuner = Tuner(
            INCUMBENT,
            lambda sizes, arrivals: OTHERS,
            Agreement(store, rank, size, "t", timedelta(seconds=20)),
            budget=BUDGET,
            known=known if rank == 0 else None,
            trials=trials,
        )
        luck = random.Random(rank)
        tried = []
        for step in range(steps):
            tried.append(tuner.setting.label)
            base = seconds[tuner.setting.label] * (2.0 if step >= drift_at else 1.0)
            if rank == 1 and slow_rank:
                base = slow_rank.get(tuner.setting.label, base)
            tuner.step_ended(StepSeen(base * (1 + noise * luck.random()), SIZES, (0.0, 0.1, 0.2)))
        return tried, tuner

    return run_ranks(size, run)


FLAT = {"as begun": 1.0, "number 1": 1.0, "number 2": 1.0, "number 3": 1.0}


@pytest.mark.parametrize("best", ["number 1", "number 2", "number 3"])
def test_the_fastest_wins_on_all_ranks(best: str) -> None:
    for tried, tuner in train(FLAT | {best: 0.8}, 150, noise=0.05, size=3):
        assert tuner.setting.label == best
        assert not tuner.tuning
        assert set(tried) == set(FLAT)


def test_all_ranks_try_the_same_setting_at_the_same_step() -> None:
    first, *others = [tried for tried, _ in train(FLAT | {"number 2": 0.9}, 150, noise=0.3, size=3)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("gain", [0.0, 0.01, -0.5])
def test_what_is_not_clearly_better_does_not_replace_the_incumbent(gain: float) -> None:
    for _, tuner in train(FLAT | {name: 1.0 - gain for name in FLAT if name != "as begun"}, 150):
        assert tuner.setting.label == "as begun"


def test_the_slowest_rank_counts() -> None:
    # Faster on rank 0, slower on rank 1: a step is over when the last rank is done.
    for _, tuner in train(FLAT | {"number 1": 0.5}, 150, slow_rank={"number 1": 3.0}):
        assert tuner.setting.label == "as begun"


def test_tuning_ends_within_its_budget_and_then_leaves_the_step_alone() -> None:
    (tried, tuner), *_ = train(FLAT | {"number 3": 0.7}, 400)
    last_change = max(step for step in range(1, 400) if tried[step] != tried[step - 1])
    # settling, profile, 4 + 2 settings of 4 and 8 steps, three turns of two
    assert last_change <= 3 + 5 + 4 * 4 + 2 * 8 + 3 * 2 * 4 + 1
    assert set(tried[last_change:]) == {"number 3"}
    assert not tuner.tuning


def test_when_the_network_drifts_tuning_begins_again() -> None:
    (tried, _), *_ = train(FLAT | {"number 2": 0.8}, 400, drift_at=150)
    assert set(tried[100:150]) == {"number 2"}
    assert len(set(tried[150:])) > 1


def test_a_profile_is_tried_before_it_is_believed() -> None:
    known = TunerSetting("from a profile", (2, 3), SIZES, 0, "flat", 1)
    for seconds, expected in ((0.5, "from a profile"), (2.0, "as begun")):
        for tried, tuner in train(FLAT | {"from a profile": seconds}, 150, known=known):
            assert "from a profile" in tried
            assert tuner.setting.label == expected


def test_without_trials_the_first_proposal_is_taken_for_good() -> None:
    for tried, tuner in train(FLAT | {"number 1": 3.0}, 60, trials=False):
        began = BUDGET.settle_steps + 1 + BUDGET.profile_steps
        assert tried == ["as begun"] * began + ["number 1"] * (60 - began)
        assert not tuner.tuning


def test_proposals_are_distinct_exact_and_fit_the_buckets() -> None:
    links = (Link(4e-6, 5e9), Link(3e-4, 25e6))
    cluster = uniform_cluster((2, 4), [Level(name, link) for name, link in zip(LEVEL_NAMES, links, strict=False)])
    settings = propose(cluster, INCUMBENT, (1 << 20,) * 12, [0.01 * index for index in range(12)])
    assert {setting.plan for setting in settings} == {"hierarchical", "flat"}
    for setting in settings:
        assert setting.cuts[-1] == 12
        setting.fusion.ends_transfer([1 << 20], 1 << 20)


def test_a_line_through_two_predictions_gives_back_both() -> None:
    links = (Link(4e-6, 5e9), Link(3e-4, 25e6))
    cluster = uniform_cluster((2, 4), [Level(name, link) for name, link in zip(LEVEL_NAMES, links, strict=False)])
    alpha, beta = affine(cluster, "flat", 8 << 20)
    assert alpha > 0
    assert beta == pytest.approx(2 * 7 / 8 / 25e6, rel=1e-6)
