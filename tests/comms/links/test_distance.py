"""Laws: a longer path takes more connections and never less time; without a round trip nothing changes."""

import json
import math

import pytest

from gradwire.cli import predict
from gradwire.comms.links.distance import (
    MOST_CONNECTIONS,
    connection_rate,
    connections_for,
    over_distance,
    ramp_seconds,
)
from gradwire.topology.cluster import Link
from gradwire.topology.fabric import TCP_SHARE

LINK = Link(30e-6, 12.5e6)


def test_how_many_connections_a_path_takes() -> None:
    megabit = 125_000
    assert connections_for(0.001, 1250 * megabit) == 1  # a local network, however fast
    assert connections_for(0.04, 100 * megabit) == 35  # 0.5 MB under way, 14,480 bytes in each
    assert connections_for(0.02, 100 * megabit) == 18
    assert connections_for(0.08, 1 * megabit) == 1
    assert connections_for(10.0, 1e12) == MOST_CONNECTIONS
    assert all(
        connections_for(trip, rate) <= connections_for(2 * trip, rate) <= connections_for(2 * trip, 2 * rate)
        for trip in (0.004, 0.03, 0.2)
        for rate in (1e5, 1e7, 1e9)
    )


def test_a_window_is_what_the_formula_says() -> None:
    assert connection_rate(0.08, 0.001) * 0.08 == pytest.approx(1448 * math.sqrt(1500), rel=1e-12)  # 56 kB
    assert connection_rate(0.08, 0) == connection_rate(0, 0.1) == math.inf


def test_a_ramp_is_what_windows_that_double_lose() -> None:
    """1 MB fits on the path; 16 connections of 14,480 bytes double 2.1 times until then."""
    first, full = 16 * 14480, 1e6
    lost = 0.08 * math.log2(full / first) - (full - first) / 12.5e6
    assert ramp_seconds(0.08, 12.5e6, 16) == pytest.approx(lost)
    assert ramp_seconds(0.001, 12.5e6, 1) == 0


def test_no_round_trip_changes_nothing() -> None:
    assert over_distance(LINK, 4, 0.0) == LINK


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_time_grows_with_the_round_trip_and_with_loss(nodes: int) -> None:
    def seconds(round_trip: float, loss: float) -> float:
        link = over_distance(LINK, nodes, round_trip, loss)
        return 2 * (nodes - 1) * link.alpha_seconds + 2e7 / link.rate(1)

    near, far = (seconds(trip, 0.0) for trip in (0.02, 0.08))
    assert seconds(0.0, 0.0) < near < far < seconds(0.08, 0.01)
    # The round trips of a ring would be 2 (n - 1); these are one half or two halves, and a ramp of under two.
    assert far - seconds(0.0, 0.0) < 3 * 0.08


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--rtt", "11s"], "`--rtt`: found '11s', wanted at most 10s"),
        (["--rtt", "80"], "`--rtt`: found '80', wanted a time with its unit"),
        (["--loss", "0.1%"], "`--loss` is given without `--rtt`"),
        (["--rtt", "80ms", "--loss", "120%"], "`--loss`: found '120%'"),
        (["--rtt", "80ms", "--preset", "pcie_box"], "`--rtt` is given for machines with GPUs"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--preset", "cpu_only", "--nodes", "2", "--nic", "100mbit", "--gradient-mb", "16", *given]
    assert predict.main(asked) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_predict_prices_the_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*given: str) -> float:
        asked = ["--preset", "cpu_only", "--nodes", "2", "--ranks-per-node", "1", "--nic", "100mbit"]
        assert predict.main([*asked, "--gradient-mb", "16", "--json", *given]) == 0
        found: float = json.loads(capsys.readouterr().out)["plans"]["flat"]["seconds"]
        return found

    near, far, lossy = seconds(), seconds("--rtt", "80ms"), seconds("--rtt", "80ms", "--loss", "1%")
    assert near == pytest.approx(16e6 / (TCP_SHARE * 12.5e6), rel=0.02)
    assert near + 0.04 < far < near + 0.2
    assert lossy > far
