"""What `gpu_report` times for docs/reference/gpu.md besides bench/kernels/cases.py: packing, sums, many matrices."""

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradwire.bench.kernels.cases import RANK, SETS, WORKERS, KernelCase, all_cases
from gradwire.compressors.kernels.cuda.pack import PackTable
from gradwire.compressors.kernels.dispatch import KERNELS_ON
from gradwire.compressors.quantize import QuantizeCodec

TENSORS = 64
SCALE = 0.25
MATRICES = 50
LARGEST_SIDE = 8192


def _parameters(numel: int, device: torch.device) -> list[list[Tensor]]:
    """`SETS` sets of `TENSORS` tensors, the later ones larger, `numel` elements in each set."""
    whole = sum(range(1, TENSORS + 1))
    bounds = [numel * done // whole for done in accumulate(range(1, TENSORS + 1), initial=0)]
    return [[torch.randn(stop - start, device=device) for start, stop in pairwise(bounds)] for _ in range(SETS)]


def pack_case(numel: int, device: torch.device) -> KernelCase:
    """Many gradients into one bucket, scaled while they move."""
    sets, buckets = _parameters(numel, device), [torch.empty(numel, device=device) for _ in range(SETS)]
    tables = [PackTable(tensors, _offsets(tensors), SCALE) for tensors in sets]

    def composed(i: int) -> None:
        torch.cat(sets[i], out=buckets[i])
        buckets[i].mul_(SCALE)

    return KernelCase("pack", 8.0 * numel, lambda i: tables[i].pack(buckets[i]), composed, buckets)


def unpack_case(numel: int, device: torch.device) -> KernelCase:
    """The bucket back into the gradients, scaled while it moves."""
    sets, buckets = _parameters(numel, device), [torch.randn(numel, device=device) for _ in range(SETS)]
    tables = [PackTable(tensors, _offsets(tensors), SCALE) for tensors in sets]
    pieces = [list(torch.split(bucket, [tensor.numel() for tensor in sets[0]])) for bucket in buckets]

    def composed(i: int) -> None:
        torch._foreach_copy_(sets[i], pieces[i])
        torch._foreach_mul_(sets[i], SCALE)

    return KernelCase("unpack", 8.0 * numel, lambda i: tables[i].unpack(buckets[i]), composed, sets[0])


def _offsets(tensors: list[Tensor]) -> list[int]:
    return list(accumulate((tensor.numel() for tensor in tensors[:-1]), initial=0))


def fp16_decode_case(numel: int, device: torch.device) -> KernelCase:
    """The sum of four workers' float16 payloads."""
    rows = torch.randn(WORKERS, numel, device=device).half()
    targets = [torch.empty(numel, device=device) for _ in range(SETS)]
    kernels = KERNELS_ON[rows.device.type]

    def composed(i: int) -> None:
        torch.sum(rows, 0, dtype=torch.float32, out=targets[i])

    return KernelCase(
        "fp16_decode_reduce",
        (4.0 + 2 * WORKERS) * numel,
        lambda i: kernels.cast_decode_reduce(rows, None, targets[i]),
        composed,
        targets,
    )


def int4_decode_case(numel: int, device: torch.device) -> KernelCase:
    """The sum of four workers' 4-bit payloads."""
    codec, targets = QuantizeCodec(4), [torch.empty(numel, device=device) for _ in range(SETS)]
    payloads = torch.empty(WORKERS, codec.wire_nbytes(numel), dtype=torch.uint8, device=device)
    for payload in payloads:
        codec.encode(torch.randn(numel, device=device), payload)
    head = codec.wire_nbytes(numel) - numel // 2
    ranges = payloads[:, :head].contiguous().view(torch.float32).view(WORKERS, -1, 2)
    kernels = KERNELS_ON[payloads.device.type]

    def composed(i: int) -> None:
        targets[i].zero_()
        for worker in range(WORKERS):
            packed = payloads[worker, head:]
            codes = torch.stack([packed & 15, packed >> 4], 1).view(-1, 512)
            unit, low = ranges[worker, :, :1], ranges[worker, :, 1:]
            targets[i].view(-1, 512).add_(torch.addcmul(low, codes, unit))

    return KernelCase(
        "int4_decode_reduce",
        (4.0 + WORKERS / 2) * numel,
        lambda i: kernels.quantize_decode_reduce(4, payloads, None, targets[i]),
        composed,
        targets,
    )


def orthogonalize_case(numel: int, device: torch.device) -> KernelCase:
    """The factors of 50 matrices, rank 4, up to 8192 long, against a loop of torch.linalg.qr; `numel` is not used."""
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
        "pack": pack_case,
        "unpack": unpack_case,
        "fp16_decode_reduce": fp16_decode_case,
        "int4_decode_reduce": int4_decode_case,
        "orthogonalize_50": orthogonalize_case,
    }
    made: dict[str, Callable[[], KernelCase]] = {
        name: lambda make=make: make(numel, device)  # type: ignore[misc]
        for name, make in own.items()
    }
    return all_cases(numel, device) | made
