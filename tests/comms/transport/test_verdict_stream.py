"""The mark of a lost step is copied on a stream that no collective can hold up."""

from collections import defaultdict
from itertools import count

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
