"""Fusion in real DDP jobs: no plan, no change of plan and no tuning changes a bit of a trained model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from gradwire.comms.wrap import wrap

NODES = "aabc"
Results = list[dict[str, object]]
RunJob = Callable[[Path, Path, str], Results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fusion")


@pytest.fixture(scope="module")
def results(folder: Path, run_job: RunJob) -> Results:
    return run_job(Path(__file__).parent / "jobs" / "fusion_scenarios.py", folder, NODES)


@pytest.mark.parametrize("name", ["small", "all", "changing", "unused", "joined", "calculated", "searched", "kept"])
def test_all_ranks_end_with_the_same_bits(results: Results, name: str) -> None:
    assert len({result[name] for result in results}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("small", "all"),
        ("small", "changing"),
        ("unused", "unused_again"),
        ("joined", "joined_again"),
        ("calculated", "not_calculated"),
        ("searched", "not_calculated"),
        ("kept", "not_calculated"),
    ],
)
def test_no_plan_changes_a_bit(results: Results, one: str, other: str) -> None:
    assert results[0][one] == results[0][other]


def test_fused_buckets_need_fewer_collectives(results: Results) -> None:
    assert results[0]["small_launches"] > 5 * results[0]["all_launches"]  # type: ignore[operator]


def test_steps_are_counted_where_parameters_are_unused(results: Results) -> None:
    assert results[0]["unused_steps"] == 10


def test_the_cuts_are_kept_on_rank_0(results: Results, folder: Path) -> None:
    profile = json.loads((folder / "profile0.json").read_text())
    assert profile["plan"]["cuts"] and not (folder / "profile1.json").exists()
    assert profile["key"]["world"] == len(NODES)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="`base_bucket_mb`"):
        wrap(nn.Linear(2, 2), base_bucket_mb=0)
    with pytest.raises(ValueError, match="`bucket_cap_mb`"):
        wrap(nn.Linear(2, 2), ddp_options={"bucket_cap_mb": 3})


def test_a_running_job_is_advised_with_its_headroom(results: Results) -> None:
    assert "without any it would take" in str(results[0]["advice"])
    assert "recommended: plan" in str(results[0]["advice"])
