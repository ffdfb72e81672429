"""When gradwire's collectives stay away from the sum that DDP issues beside the buckets.

That nothing waits for ever is the law of tests/gpu_standin/test_schedules.py, on a GPU with few multiprocessors.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.bootstrap.compat import GradBucket, queue_end_of_backward
from gradwire.comms.step.used_map import UsedMap

CUDA = torch.device("cuda", 0)


class Recorded:
    """A communicator, and a device, that are told to wait."""

    def __init__(self) -> None:
        self.rejoined, self.waited = 0, 0

    def sync_current_stream(self) -> None:
        self.rejoined += 1

    def synchronize(self, device: torch.device) -> None:
        self.waited += 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "first", "every"),
    [
        ({}, 0, 0),
        ({"find_unused_parameters": True}, 0, 1),
        ({"static_graph": True}, 1, 0),
        ({"static_graph": True, "find_unused_parameters": True}, 1, 0),
        (None, 0, 0),
    ],
    ids=["neither", "find_unused_parameters", "static_graph", "both", "not a DDP model"],
)
def test_where_ddp_sums_the_map(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None, first: int, every: int
) -> None:
    layer = nn.Linear(2, 2)
    recorded = Recorded()
    monkeypatch.setattr(torch.cuda, "synchronize", recorded.synchronize)
    used = UsedMap(layer if options is None else DistributedDataParallel(layer, **options), CUDA)
    for step in range(3):
        used.step_began(step)
        used.last_bucket_sent(recorded)
    assert (recorded.waited, recorded.rejoined) == (first, 3 * every)


@pytest.mark.usefixtures("alone")
def test_a_call_that_is_queued_when_backward_has_ended_comes_behind_ddps() -> None:
    """DDP takes the averages in a call of autograd's, and waits for its map there: gradwire's step ends behind it."""
    layer = nn.Linear(2, 2)
    model = DistributedDataParallel(layer, find_unused_parameters=True)
    seen: list[float] = []

    def note() -> None:
        assert layer.bias.grad is not None
        seen.append(float(layer.bias.grad[0]))

    def ended() -> None:
        note()
        assert queue_end_of_backward(note)

    def threefold(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert queue_end_of_backward(ended)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(3 * bucket.buffer())
        return future

    model.register_comm_hook(None, threefold)
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [1.0, 3.0]
