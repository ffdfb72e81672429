"""Kernel cases that the GPU report adds to those of bench/kernels/cases.py: a sum of float16, and many matrices."""

from collections.abc import Callable

import torch

from gradwire.bench.kernels.cases import RANK, SETS, WORKERS, KernelCase, all_cases
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.kernels.dispatch import KERNELS_ON

MATRICES = 50
LARGEST_SIDE = 8192


def fp16_decode_case(numel: int, device: torch.device) -> KernelCase:
    """Makes the case that sums four workers' float16 payloads of `numel` elements; compared with `torch.sum`."""
    rows = torch.randn(WORKERS, numel, device=device).half()
    targets = [torch.empty(numel, device=device) for _ in range(SETS)]
    codec, payloads = CastCodec("float16"), rows.view(torch.uint8)

    def composed(i: int) -> None:
        torch.sum(rows, 0, dtype=torch.float32, out=targets[i])

    return KernelCase(
        "fp16_decode_reduce",
        (4.0 + 2 * WORKERS) * numel,
        lambda i: codec.decode_reduce(payloads, None, targets[i]),
        composed,
        targets,
    )


def orthogonalize_case(numel: int, device: torch.device) -> KernelCase:
    """Makes the case that orthogonalizes the factors of 50 matrices, rank 4, up to 8192 long.

    It is compared with a loop of torch.linalg.qr; `numel` is not used.
    """
    sides = [LARGEST_SIDE * (index + 1) // MATRICES for index in range(MATRICES)]
    factors = [[torch.randn(RANK, side, device=device) for side in sides] for _ in range(SETS)]
    columns = [[factor.t().contiguous() for factor in each] for each in factors]
    kernels, keys = KERNELS_ON[factors[0][0].device.type], list(range(MATRICES))

    def composed(i: int) -> None:
        for matrix in columns[i]:
            torch.linalg.qr(matrix, out=(matrix, torch.empty(0, device=device)))

    return KernelCase(
        "orthogonalize_50",
        8.0 * RANK * sum(sides),
        lambda i: kernels.orthogonalize_many(factors[i], keys),
        composed,
        factors[0],
    )


def gpu_cases(numel: int, device: torch.device) -> dict[str, Callable[[], KernelCase]]:
    """Returns what makes each case, by name: those of `gradwire bench kernels`, then this file's.

    Args:
        numel: Elements of the gradient, a multiple of 1024.
        device: A CUDA device.
    """
    own = {
        "fp16_decode_reduce": fp16_decode_case,
        "orthogonalize_50": orthogonalize_case,
    }
    made: dict[str, Callable[[], KernelCase]] = {
        name: lambda make=make: make(numel, device)  # type: ignore[misc]
        for name, make in own.items()
    }
    return all_cases(numel, device) | made
