"""The narrow all_reduce, and the exchange that sums in float32."""

import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Slice
from gradwire.compressors.codecs.cast import Cast
from gradwire.compressors.optim.peers import run_requests
from support.threads import ThreadGroup, take_turns

LAYOUT = Layout((Slice("w", (1000,), 0, 0, 1000),))


def reduced(plain: bool, inputs: list[Tensor]) -> list[Tensor]:
    groups = ThreadGroup.create(len(inputs))

    def body(rank: int) -> Tensor:
        shard, ours = inputs[rank].clone(), Cast("bf16", plain=plain)
        run_requests(ours.all_reduce(shard, LAYOUT, groups[rank].member), groups[rank])
        return shard

    return take_turns(len(inputs), body)


def test_the_narrow_sum_is_torchs() -> None:
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    wanted = (inputs[0].bfloat16() + inputs[1].bfloat16() + inputs[2].bfloat16()).float()
    assert all(torch.equal(output, wanted) for output in reduced(True, inputs))


def test_the_sum_in_float32_does_not_lose_small_addends() -> None:
    """1 + 2^-9 four times: a bfloat16 sum rounds each addend away."""
    inputs = [torch.ones(1000)] + [torch.full((1000,), 2.0**-9)] * 4
    assert float(reduced(True, inputs)[0][0]) == 1.0
    assert float(reduced(False, inputs)[0][0]) == 1.0 + 2.0**-7


def test_overflow_reaches_everybody() -> None:
    groups = ThreadGroup.create(2)

    def body(rank: int) -> Tensor:
        shard = torch.full((1000,), 1e6 if rank else 1.0)
        run_requests(Cast("fp16").all_reduce(shard, LAYOUT, groups[rank].member), groups[rank])
        return shard

    assert all(output.isinf().all() for output in take_turns(2, body))
