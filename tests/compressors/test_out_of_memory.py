"""Law: a compressor that finds no memory before its first collective has not touched the gradient or its state."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain

import pytest
import torch
from torch import Tensor

from gradwire.comms.transport.echo import EchoGroup
from gradwire.compressors.base import Compressor, Layout, Request
from gradwire.compressors.optim.peers import run_requests
from gradwire.compressors.registry import Option, make

SIZE = 3
COMPRESSORS: dict[str, Mapping[str, Option]] = {
    "none": {},
    "fp16": {},
    "int4": {},
    "onebit": {"warmup_steps": 0},
    "dgc": {"warmup_steps": 0, "density": 0.05},
    "powersgd": {"warmup_steps": 0},
}


def first_round(
    compressor: Compressor, shard: Tensor, layout: Layout, memory: AbstractContextManager[object]
) -> Iterator[Request] | None:
    """What is left to do after the first collective; None where memory was short before it."""
    rounds = compressor.all_reduce(shard, layout, EchoGroup(SIZE).member)
    try:
        with memory:
            first = next(rounds)
    except torch.OutOfMemoryError:
        return None
    return chain((first,), rounds)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_gradient_survives(
    name: str, layout: Layout, full_memory: Callable[[int], AbstractContextManager[object]]
) -> None:
    compressor, twin = (make(name, COMPRESSORS[name]) for _ in range(2))
    numels = {piece.name: torch.Size(piece.shape).numel() for piece in layout.slices}
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    for each in (compressor, twin):  # a first step, so that there are residuals
        each.bind_model(numels)
        run_requests(each.all_reduce(gradient.clone(), layout, EchoGroup(SIZE).member), EchoGroup(SIZE))
        each.end_step(True)
    shard, allowed = gradient.clone(), 0
    while (rounds := first_round(compressor, shard, layout, full_memory(allowed))) is None:
        assert torch.equal(shard, gradient), f"changed before allocation {allowed + 1}"
        compressor.end_step(False)
        allowed += 1
    assert allowed > 0 or name == "none"
    wanted = gradient.clone()
    run_requests(rounds, EchoGroup(SIZE))
    run_requests(twin.all_reduce(wanted, layout, EchoGroup(SIZE).member), EchoGroup(SIZE))
    assert torch.equal(shard, wanted), "the failures have left traces in the state"
