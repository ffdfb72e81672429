"""How a replay is scaled: ratios of seconds stay, whatever is chosen."""

import pytest
import torch
import torch.distributed as dist

from gradwire.bench.compare.replay import ReplayCase, load_case
from gradwire.bench.compare.replay_scale import (
    DDP_BUCKET_MEGABYTES,
    LEAST_STEP_SECONDS,
    MESSAGE_SHARE,
    MOST_GRADIENT_NBYTES,
    MOST_STEP_SECONDS,
    Scale,
    count_buckets,
    fit_scale,
    message_seconds,
    plain_step_seconds,
)
from gradwire.bench.compare.replay_shapes import SHAPES

NIC = 25_000_000_000


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", [16, 32])
@pytest.mark.parametrize("rate", [NIC, 5_000_000_000])
def test_messages_are_a_small_part_of_a_step_that_stays_short(name: str, ranks: int, rate: int) -> None:
    case = load_case(name)
    scale = fit_scale(case, ranks, rate, None, None)
    assert MOST_GRADIENT_NBYTES / 2 < case.nbytes / scale.factor <= MOST_GRADIENT_NBYTES
    step = scale.slow_motion * plain_step_seconds(case, ranks, rate)
    # A whole number of times as slow: a step of half a second comes within a quarter of what is wanted.
    assert 0.75 * LEAST_STEP_SECONDS < step < 1.25 * MOST_STEP_SECONDS
    assert message_seconds(case, ranks) < 1.25 * MESSAGE_SHARE * step or step > 0.75 * MOST_STEP_SECONDS


@pytest.mark.parametrize("name", SHAPES)
def test_buckets_are_those_that_ddp_makes(name: str) -> None:
    case = load_case(name)
    gradients = [torch.empty(shape) for _, shape in reversed(case.parameters)]
    buckets, _ = dist._compute_bucket_assignment_by_size(gradients, [int(DDP_BUCKET_MEGABYTES * 2**20)])  # type: ignore[attr-defined]  # what DDP itself calls
    assert count_buckets(case) == len(buckets)


@pytest.mark.parametrize(
    ("step_seconds", "bits_per_second", "wanted"), [(0.3, 800_000, 0.3), (0.3, 4_000, 0.1 + 0.3), (0.0, 8_000, 0.15)]
)
def test_the_ring_hides_under_the_backward_pass_alone(step_seconds: float, bits_per_second: int, wanted: float) -> None:
    case = ReplayCase("one", (("a", (25,)),), step_seconds, "made up")  # 100 bytes, 1.5 of each on the ring of four
    assert plain_step_seconds(case, 4, bits_per_second) == pytest.approx(wanted)


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
