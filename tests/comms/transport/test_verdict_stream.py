"""The mark of a lost step is copied on a stream that no collective can hold up."""

from collections import defaultdict
from itertools import count
from typing import NoReturn

import pytest
import torch

from fake_cuda.patch import fake_cuda
from fake_cuda.streams import FakeStream
from gradwire.comms.streams import SideStreams

POOL_STREAMS = 32
"""Streams of one priority that torch hands out in turn. Source: kStreamsPerPool of c10/cuda/CUDAStream.h."""


def test_the_verdict_shares_no_stream_with_callbacks_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda():
        pools: dict[int, list[FakeStream]] = defaultdict(list)
        turns: dict[int, count[int]] = defaultdict(count)

        def from_pool(device: object = None, priority: int = 0) -> FakeStream:
            if not pools[priority]:
                pools[priority] = [FakeStream(device, priority) for _ in range(POOL_STREAMS)]
            return pools[priority][next(turns[priority]) % POOL_STREAMS]

        monkeypatch.setattr(torch.cuda, "Stream", from_pool)
        device = torch.device("cuda", 0)
        side = SideStreams(device)
        mine = side.verdict._stream
        callbacks = [from_pool(device) for _ in range(40)]  # a future's `then` takes one, which waits for a collective
        assert len(set(map(id, callbacks))) == POOL_STREAMS
        more = [stream for _ in range(20) for stream in SideStreams(device)._streams]  # of other models
        assert all(each is not mine for each in [*callbacks, *side._streams, *more])


def failed(*arguments: object, **named: object) -> NoReturn:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_has_failed_keeps_no_rank_from_telling_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Every call raises then, the copy of the verdict, too; the abort comes behind it."""
    with fake_cuda():
        verdict = SideStreams(torch.device("cuda", 0)).verdict
        verdict._stream.record_event = failed  # type: ignore[method-assign]
        verdict.give_up()
    assert "does not respond (CUDA error: an illegal memory access" in caplog.text
