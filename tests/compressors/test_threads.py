"""One compressor serves several shards at once, each in a thread of its own, as an executor drives it."""

import threading
import time

import pytest
import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import make
from support.threads import ThreadGroup, run_ranks, take_turns

LAYOUTS = [Layout((Slice(f"w{i}", (40, 50), 0, 0, 2000),)) for i in range(4)]


def outputs_of(name: str, concurrent: bool) -> list[list[Tensor]]:
    options = {"warmup_steps": 0} if name != "int4" else {}
    groups = [ThreadGroup.create(2) for _ in LAYOUTS]

    def body(rank: int) -> list[Tensor]:
        ours, outputs = make(name, options), []
        for step in range(4):
            shards = [
                torch.randn(2000, generator=torch.Generator().manual_seed(step * 10 + i + 100 * rank))
                for i in range(len(LAYOUTS))
            ]

            def drive(i: int, shards: list[Tensor] = shards) -> None:
                run_requests(ours.all_reduce(shards[i], LAYOUTS[i], groups[i][rank].member), groups[i][rank])

            threads = [threading.Thread(target=drive, args=(i,)) for i in range(len(LAYOUTS))]
            for thread in threads:
                thread.start()
                if not concurrent:
                    thread.join()
            for thread in threads:
                thread.join()
            ours.end_step(True)
            outputs += shards
        return outputs

    return run_ranks(2, body)


@pytest.mark.parametrize("name", ["int4", "waterfill4", "onebit", "dgc", "powersgd"])
def test_at_once_is_one_after_the_other(name: str) -> None:
    for ours, wanted in zip(outputs_of(name, True), outputs_of(name, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_ranks_that_take_turns_compute_one_at_a_time_and_meet_as_others_do() -> None:
    groups, inside, most = ThreadGroup.create(3), [0], [0]

    def compute() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1

    def body(rank: int) -> float:
        tensor = torch.tensor([float(rank)])
        for _ in range(3):
            compute()
            groups[rank].all_reduce(tensor)
        return tensor.item()

    assert take_turns(3, body) == run_ranks(3, body) == [27.0] * 3
    most[0] = 0
    take_turns(3, body)
    assert most == [1]
