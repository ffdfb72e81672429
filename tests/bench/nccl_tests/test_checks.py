"""Bounds of lossy results: every compressor keeps its own, and a broken one is noticed."""

import pytest
import torch

from gradwire.bench.nccl_tests.checks import bound_of, coding_seconds, count_outside, gradients
from gradwire.compressors.registry import make, names


@pytest.mark.parametrize("name", names())
def test_the_exact_sum_is_within_every_bound(name: str) -> None:
    inputs = gradients(4, 2000, seed=1)
    assert count_outside(name, torch.stack(inputs).sum(0), inputs) == 0
    assert bound_of(name)


@pytest.mark.parametrize("name", names())
def test_a_broken_result_is_outside(name: str) -> None:
    inputs = gradients(4, 2000, seed=1)
    assert count_outside(name, -3 * torch.stack(inputs).sum(0), inputs) > 0
    assert count_outside(name, torch.full((2000,), float("nan")), inputs) == 2000


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_twice_keeps_the_bound_of_a_cast(name: str, dtype: torch.dtype) -> None:
    inputs = gradients(8, 50_000, seed=2)
    total = torch.stack([each.to(dtype).float() for each in inputs]).sum(0).to(dtype).float()
    assert count_outside(name, total, inputs) == 0


def test_a_codec_is_timed() -> None:
    codec = make("int8", {}).codec  # type: ignore[attr-defined]  # int8 is a TwoStage
    assert all(seconds > 0 for seconds in coding_seconds(codec, torch.randn(10_000)))
