"""How a replay is scaled: ratios of seconds stay, whatever is chosen."""

import pytest

from gradwire.bench.replay import load_case
from gradwire.bench.replay_scale import MOST_GRADIENT_NBYTES, STEP_SECONDS, Scale, fit_scale
from gradwire.bench.replay_shapes import SHAPES

NIC = 25_000_000_000


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [16, 32])
def test_every_network_fits_and_its_step_is_short(name: str, ranks: int) -> None:
    case = load_case(name)
    scale = fit_scale(case, ranks, NIC, None, None)
    assert MOST_GRADIENT_NBYTES / 2 < case.nbytes / scale.factor <= MOST_GRADIENT_NBYTES
    step = scale.slow_motion * max(case.step_seconds, 2 * (ranks - 1) / ranks * case.nbytes * 8 / NIC)
    assert 0.5 * STEP_SECONDS < step < 1.5 * STEP_SECONDS


@pytest.mark.parametrize(("factor", "slow_motion"), [(1, 1), (16, 1), (1, 9), (64, 12)])
def test_waits_and_transfers_keep_their_ratio(factor: int, slow_motion: int) -> None:
    case = load_case("resnet50")
    scale = fit_scale(case, 32, NIC, factor, slow_motion)
    assert scale == Scale(factor, slow_motion)
    really = case.nbytes * 8 / NIC / case.step_seconds
    replayed = case.nbytes / factor * 8 / scale.link(NIC) / (case.step_seconds * slow_motion)
    assert replayed == pytest.approx(really, rel=1e-4)


def test_there_are_as_many_buckets_as_the_network_has() -> None:
    case = load_case("vgg16")
    assert case.nbytes / 64 / Scale(64, 3).bucket_megabytes == pytest.approx(case.nbytes / 25)
