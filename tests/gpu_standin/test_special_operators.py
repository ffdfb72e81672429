"""Operators that the CPU does not have, or not with these dtypes: the numbers of the same thing on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_batch_norm_of_two_ranks_is_that_of_both_inputs(dtype: torch.dtype) -> None:
    """What torch.nn.SyncBatchNorm calls, on the halves of one batch, which differ in size."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(9, 3, 4, generator=generator, dtype=torch.float64).to(dtype).cuda()
    gradient = torch.randn(9, 3, 4, generator=generator, dtype=torch.float64).to(dtype).cuda()
    weight, bias = torch.tensor([1.0, 2, 3]).cuda(), torch.tensor([3.0, 2, 1]).cuda()
    running_mean, running_variance = torch.zeros(3).cuda(), torch.ones(3).cuda()
    halves, gradients = torch.split_with_sizes(inputs, [2, 7]), torch.split_with_sizes(gradient, [2, 7])
    counts = torch.tensor([8.0, 28.0]).cuda()
    means, inverses = map(torch.stack, zip(*(torch.batch_norm_stats(half, 1e-5) for half in halves), strict=True))
    gathered = halves[0], means, inverses, running_mean, running_variance, 0.1, 1e-5, counts
    mean, inverse = torch.ops.aten.batch_norm_gather_stats_with_counts(*gathered)
    outputs = [torch.batch_norm_elemt(half, weight, bias, mean, inverse, 1e-5) for half in halves]
    sums = [
        torch.batch_norm_backward_reduce(given, half, mean, inverse, weight, True, True, True)
        for given, half in zip(gradients, halves, strict=True)
    ]
    plain, moved, of_weight, of_bias = (sum(parts) for parts in zip(*sums, strict=True))
    back = [
        torch.batch_norm_backward_elemt(given, half, mean, inverse, weight, plain, moved, counts)
        for given, half in zip(gradients, halves, strict=True)
    ]

    known = nn.BatchNorm1d(3).double()
    known.weight.data, known.bias.data = weight.double().cpu(), bias.double().cpu()
    values = inputs.double().cpu().requires_grad_()
    wanted = known(values)
    wanted.backward(gradient.double().cpu())
    absolute, relative = (5e-3, 2e-3) if dtype == torch.float16 else (1e-5, 1e-5)
    pairs = [
        (torch.cat(outputs), wanted),
        (torch.cat(back), values.grad),
        (of_weight, known.weight.grad),
        (of_bias, known.bias.grad),
        (running_mean, known.running_mean),
        (running_variance, known.running_var),
    ]
    for found, right in pairs:
        assert right is not None and torch.allclose(found.double().cpu(), right, relative, absolute)


@pytest.mark.parametrize("function", [nn.functional.softmax, nn.functional.log_softmax])
def test_a_softmax_of_half_numbers_gives_float32(function: Callable[..., Tensor]) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).half()
    given, known = values.cuda().requires_grad_(), values.float().requires_grad_()
    result, wanted = function(given, 1, dtype=torch.float32), function(known, 1)
    weights = torch.arange(35.0).view(5, 7) / 35
    torch.autograd.backward((result * weights.cuda()).sum())
    torch.autograd.backward((wanted * weights).sum())
    assert result.dtype == torch.float32 and torch.allclose(result.cpu(), wanted)
    assert given.grad is not None and known.grad is not None
    assert given.grad.dtype == torch.float16 and torch.allclose(given.grad.cpu(), known.grad.half(), atol=1e-4)


def test_a_stream_is_busy_for_the_cycles_of_sleep() -> None:
    """The one kernel of torch's own that is launched here: whatever the machine does, the clock is not faster."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    ended.record()
    ended.synchronize()
    assert began.elapsed_time(ended) >= 20
