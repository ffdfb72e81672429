"""What the report about a GPU times: kernel and torch composition do the same work."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from gradwire.bench.kernels.cases import KernelCase, quantize_decode_case
from gradwire.bench.studies.gpu.cases import fp16_decode_case, orthogonalize_case

NUMEL = 16_384


def both(case: KernelCase) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What kernel and composition write, given the same."""
    case.ours(0)
    ours = [output.cpu().clone() for output in case.outputs]
    for output in case.outputs:
        output.zero_()
    case.composed(0)
    return ours, [output.cpu() for output in case.outputs]


@pytest.mark.parametrize("make", [fp16_decode_case, partial(quantize_decode_case, 4)])
def test_sums_of_payloads(device: torch.device, make: Callable[[int, torch.device], KernelCase]) -> None:
    ours, composed = both(make(NUMEL, device))
    torch.testing.assert_close(ours[0], composed[0])


def test_orthogonal_rows(device: torch.device) -> None:
    case = orthogonalize_case(NUMEL, device)
    case.ours(0)
    for matrix in case.outputs:
        torch.testing.assert_close(matrix @ matrix.t(), torch.eye(len(matrix), device=device), rtol=0.0, atol=1e-5)
    case.composed(0)
