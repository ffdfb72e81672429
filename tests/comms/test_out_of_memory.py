"""Law: buckets that find no memory to travel together keep their gradients."""

import pytest
import torch
from torch import Tensor

from gradwire.comms.fusion import Fusion, FusionPlan
from gradwire.compressors.base import Layout


def nowhere(flat: Tensor, layout: Layout | None) -> torch.futures.Future[Tensor]:
    raise AssertionError("launched without a buffer")


def no_memory(*sizes: object, **options: object) -> Tensor:
    raise torch.OutOfMemoryError("no memory left")


def test_joined_buckets_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = Fusion(nowhere, FusionPlan(threshold_nbytes=1 << 30))
    flats = [torch.randn(numel) for numel in (100, 7, 33)]
    before = [flat.clone() for flat in flats]
    for flat in flats:
        fusion.add(flat)
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fusion.end_step()
    assert all(torch.equal(flat, copy) for flat, copy in zip(flats, before, strict=True))
