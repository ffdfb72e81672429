"""PowerSGD on CUDA: the products are torch.mm, the rest is csrc/cuda/powersgd.cu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import address, check_tensors
from gradwire.compressors.kernels.reference import powersgd_back_project, powersgd_project

__all__ = [
    "orthogonalize_many",
    "powersgd_back_project",
    "powersgd_project",
    "powersgd_restore",
]

_TALL_THREADS = 1024
"""kTallThreads of csrc/cuda/powersgd.cu: threads of a CTA that has a matrix to itself."""


def orthogonalize_many(matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
    """See reference.orthogonalize_many; one launch, however many matrices there are.

    Raises:
        ValueError: A matrix has more rows than columns, or the keys are not as many as the matrices, or a matrix is not
            contiguous float32.
    """
    if len(matrices) != len(keys):
        raise ValueError(f"`keys` are {len(keys)}; wanted one for each of {len(matrices)} matrices")
    if not matrices:
        return
    device = matrices[0].device
    for matrix in matrices:
        check_tensors(device, matrix.numel(), torch.float32, matrix=matrix)
        if matrix.dim() != 2 or matrix.shape[0] > matrix.shape[1]:
            raise ValueError(f"`matrix` is {tuple(matrix.shape)}; wanted (rank, n) with rank <= n")
    rows = cuda_launch.scratch(device, 8 * sum(matrix.numel() for matrix in matrices)).data_ptr()
    words: list[int] = []
    for matrix, key in zip(matrices, keys, strict=True):
        words += matrix.data_ptr(), rows, *matrix.shape, key & 0xFFFFFFFF
        rows += 8 * matrix.numel()
    table = cuda_launch.upload(words, device)
    cuda_launch.launch("powersgd", "powersgd_orthogonalize", device, len(matrices), (table.data_ptr(),), _TALL_THREADS)


def powersgd_restore(matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor) -> None:
    """See reference.powersgd_restore."""
    (rows, columns), rank, device = matrix.shape, len(p), matrix.device
    check_tensors(device, rows * columns, torch.float32, matrix=matrix, new_residual=new_residual)
    check_tensors(device, rank * rows, torch.float32, p=p)
    check_tensors(device, rank * columns, torch.float32, q_own=q_own, q_sum=q_sum)
    warps = rows * -(-columns // 1024)
    cuda_launch.launch(
        "powersgd",
        "powersgd_restore",
        device,
        cuda_launch.blocks_for(device, 32 * warps),
        (
            matrix.data_ptr(),
            address(new_residual),
            p.data_ptr(),
            q_own.data_ptr(),
            q_sum.data_ptr(),
            rows,
            columns,
            rank,
        ),
    )
