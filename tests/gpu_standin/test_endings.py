"""Law: on torch's own NCCL group, too, what ends a rank ends in words on the others, which live on and can close."""

import json
import math
from typing import Any

import pytest

from gpu_standin.conftest import Jobs

KILLED = -9
LEFT = 7
LINGER = "10"
"""Seconds: rank 0 serves the store, and the others ask in it who is left."""


LONG = ("600", "900")
"""Seconds: the time-outs of gradwire and of torch, longer than the ranks may live: what ends before is no time-out."""


def survivors(jobs: Jobs, *arguments: str, status: int, nodes: str = "aab") -> list[dict[str, Any]]:
    ranks = jobs.run("endings.py", *arguments, ranks=len(nodes), NODES=nodes)
    assert ranks.statuses == [0] * (len(nodes) - 1) + [status], ranks.errors
    return [json.loads(output) for output in ranks.outputs[: len(nodes) - 1]]


def test_a_rank_that_leaves_while_nccl_connects_is_named(torch_jobs: Jobs) -> None:
    for found in survivors(torch_jobs, "connect", "hierarchical", *LONG, LINGER, status=LEFT):
        assert "connecting NCCL failed" in found["error"]
        assert "rank 2 of 3 is missing" in found["error"]


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_no_step_is_taken_silently_on_what_was_not_averaged(plan: str, torch_jobs: Jobs) -> None:
    """The host has issued the optimizer's step before anybody knows: a NaN goes into it, and the next call raises."""
    for found in survivors(torch_jobs, "kill", plan, *LONG, LINGER, status=KILLED):
        assert "rank 2 of 3 is missing" in found["error"]
        assert found["stepped"] <= 3
        assert found["stepped"] == 2 or any(map(math.isnan, found["weights"]))


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_torchs_watchdog_ends_no_process_that_gradwire_has_given_up(plan: str, torch_jobs: Jobs) -> None:
    """Both have the same time-out. The watchdog counts from the issue, would be first, and here it ends at once."""
    quick = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    ranks = torch_jobs.run("endings.py", "late", plan, "0", "10", "25", ranks=3, NODES="aab", **quick)
    assert ranks.statuses == [0, 0, 0], ranks.errors
    for found in map(json.loads, ranks.outputs[:2]):
        assert "no progress for 10 s" in found["error"]
        assert found["close_seconds"] < 10


def test_it_closes_in_order(torch_jobs: Jobs) -> None:
    ranks = torch_jobs.run("endings.py", "none", "hierarchical", *LONG, "0", ranks=3, NODES="aab")
    assert ranks.statuses == [0, 0, 0], ranks.errors
    for found in map(json.loads, ranks.outputs):
        assert found["error"] == ""
        assert found["stepped"] == 4
        assert found["weights"] == [-4.0] * 3


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_a_rank_that_closes_early_waits_for_the_last_step_of_a_late_one(plan: str, torch_jobs: Jobs) -> None:
    """A model that goes out of scope closes its hook, while the host is ahead of the device."""
    ranks = torch_jobs.run("endings.py", "behind", plan, *LONG, LINGER, ranks=3, NODES="aab")
    assert ranks.statuses == [0, 0, 0], ranks.errors
    for found in map(json.loads, ranks.outputs):
        assert found["error"] == ""
        assert found["weights"] == [-4.0] * 3
