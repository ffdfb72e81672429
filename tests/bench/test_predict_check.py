"""What is predicted for a cluster is what its network cards carry, and about the time that it takes."""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwire.bench.cluster import Cluster
from gradwire.bench.predict_check import CASES

pytestmark = pytest.mark.netns

ATTEMPTS = 2
LATE_SECONDS = 0.008
"""What several ranks on a core do to each other: a phase inside the node that takes 1.3 ms takes up to 6.3 for a rank that gets
its core late (2x2 on two cores), and there is one before the exchange and one after it."""

STEADY = 1.25
"""A measurement counts where the medians of its even and of its odd rounds differ by less than this factor."""

FOREIGN_SHARE = 0.15
"""And where other programs took less than this share of one core."""

Case = dict[str, object]


def timed(nodes: list[int], nbytes: int, rounds: int, seconds: float, names: Sequence[str]) -> tuple[int, list[Case]]:
    """What the busiest network card sent, and what was predicted and measured of each case."""
    command = [sys.executable, "-m", "gradwire.bench.predict_check", "--gradient-mb", str(nbytes / 1e6), "--rounds", str(rounds),
               "--seconds", str(seconds), "--cases", ",".join(names)]
    with Cluster(nodes, nic="200mbit") as cluster:
        result = cluster.run(command, timeout_seconds=200)
    result.check()
    lines = [line for line in result.output[0].splitlines() if line.startswith("{")]
    return result.busiest_nic_bytes, [json.loads(line) for line in lines[1:]]


def test_the_cards_carry_what_was_predicted() -> None:
    exact = ["flat", "hierarchical"]
    few, _ = timed([2, 2], 2_000_000, 1, 0.0, exact)
    many, cases = timed([2, 2], 2_000_000, 1 + 4, 0.0, exact)
    predicted = 4 * sum(float(str(case["nic_nbytes"])) for case in cases)
    # Headers, acknowledgements and the ranks' words to each other: 4 to 6 % at this size.
    assert predicted < many - few < 1.12 * predicted


def processor_seconds() -> tuple[float, float]:
    """What all programs of this machine have computed so far, and what this one and its ended ranks have."""
    user, nice = map(int, Path("/proc/stat").read_text().split()[1:3])
    own = os.times()
    return (user + nice) / os.sysconf("SC_CLK_TCK"), own.user + own.children_user


def steady(case: Case) -> bool:
    """Whether every other round takes as long as the rounds between."""
    rounds = case["rounds_seconds"]
    assert isinstance(rounds, list)
    one, other = float(statistics.median(rounds[::2])), float(statistics.median(rounds[1::2]))
    return max(one, other) < STEADY * min(one, other)


def undisturbed(nodes: list[int], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Predicted and measured seconds of each case; none where another program had much of a core meanwhile."""
    began, (machine, own) = time.monotonic(), processor_seconds()
    _, cases = timed(nodes, 8 << 20, 3, 0.3, names)
    now_machine, now_own = processor_seconds()
    foreign = (now_machine - machine) - (now_own - own)
    if foreign > FOREIGN_SHARE * (time.monotonic() - began):
        return {}
    return {str(case["name"]): (float(str(case["predicted_seconds"])), float(str(case["measured_seconds"])))
            for case in cases if steady(case)}


def near(predicted: float, measured: float) -> bool:
    """Within 20 %, or within what ranks that share a core may make each other wait."""
    return abs(predicted - measured) < max(0.2 * measured, LATE_SECONDS)


@pytest.mark.parametrize("nodes", [[2] * 2, [2] * 4, [4] * 4], ids=["2x2", "4x2", "4x4"])
def test_plans_and_compressors_take_within_20_percent_of_what_was_predicted(nodes: list[int]) -> None:
    left, missed = list(CASES), dict[str, list[tuple[float, float]]]()
    for _ in range(ATTEMPTS):  # what was missed, or disturbed, is probed, predicted and measured anew
        seconds = undisturbed(nodes, left)
        left = [name for name in left if name not in seconds or not near(*seconds[name])]
        for name in left:
            missed.setdefault(name, []).extend(seconds[name] for _ in range(name in seconds))
        if not left:
            return
    wrong = {name: missed[name] for name in left if len(missed[name]) == ATTEMPTS}
    assert not wrong, f"predicted and measured seconds, in each attempt: {wrong}"
    pytest.skip(f"other programs kept this machine busy, so {', '.join(left)} could not be measured")
