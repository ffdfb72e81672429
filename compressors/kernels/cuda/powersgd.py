"""PowerSGD on CUDA: the products are torch.mm and torch.bmm, the rest is csrc/cuda/powersgd.cu."""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.kernels.cuda import launch as cuda_launch
from gradwire.compressors.kernels.cuda.launch import address, check_tensors
from gradwire.compressors.kernels.reference import FactorRun, FactorRuns

_COLUMNS = 1024
"""kColumns of csrc/cuda/powersgd.cu: columns of a row that a warp handles in powersgd_restore."""
_TALL_THREADS = 1024
"""kTallThreads of csrc/cuda/powersgd.cu: threads of a CTA that has a matrix to itself."""


def orthogonalize_many(matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
    """Makes the rows of each matrix orthonormal, in place; one launch, however many matrices there are.

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


@functools.lru_cache(maxsize=1024)
def _batches(matrices: FactorRuns) -> tuple[tuple[FactorRun, int, tuple[int, int, int]], ...]:
    """Groups matrices of one shape that lie at even distances, so that one library call multiplies all of a group.

    Returns:
        (first matrix, number of matrices, distances) of each group. The distances, in elements, are those of the
        matrices in the shard, of their P and of their Q; all 0 for a single matrix.
    """
    shapes: dict[tuple[int, int, int], list[FactorRun]] = {}
    for run in matrices.runs:
        shapes.setdefault((run.rows, run.columns, run.rank), []).append(run)
    batches = []
    for alike in shapes.values():
        first, count, steps = alike[0], 1, (0, 0, 0)
        for before, run in itertools.pairwise(alike):
            apart = run.start - before.start, run.p_start - before.p_start, run.q_start - before.q_start
            if count == 1 or apart == steps:
                count, steps = count + 1, apart
            else:
                batches.append((first, count, steps))
                first, count, steps = run, 1, (0, 0, 0)
        batches.append((first, count, steps))
    return tuple(batches)


@functools.lru_cache(maxsize=1024)
def _spans(matrices: FactorRuns) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of the matrices in the shard; adjacent matrices are one span."""
    spans: list[tuple[int, int]] = []
    for run in matrices.runs:
        start, stop = run.start, run.start + run.rows * run.columns
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, stop))
    return tuple(spans)


@functools.lru_cache(maxsize=1024)
def _factor_table(matrices: FactorRuns) -> tuple[tuple[int, ...], int, tuple[int, int, int]]:
    """Returns the arguments of powersgd_restore's kernel that depend on the matrices alone.

    Returns:
        The words of struct Factors of csrc/cuda/powersgd.cu for each matrix; the number of work units in all; and the
        least numel of the shard, of P and of Q, which the kernel reads or writes up to there.
    """
    words: list[int] = []
    units = 0
    ends = (
        max(run.start + run.rows * run.columns for run in matrices.runs),
        max(run.p_start + run.rank * run.rows for run in matrices.runs),
        max(run.q_start + run.rank * run.columns for run in matrices.runs),
    )
    for run in matrices.runs:
        words += run.start, run.rows, run.columns, run.rank, run.p_start, run.q_start, units
        units += run.rows * -(-run.columns // _COLUMNS)
    return tuple(words), units, ends


def _stacked(flat: Tensor, start: int, count: int, step: int, rows: int, columns: int) -> Tensor:
    """Returns `count` matrices (rows, columns), `step` elements apart, as one view (count, rows, columns)."""
    return flat.as_strided((count, rows, columns), (step, columns, 1), flat.storage_offset() + start)


def powersgd_project_many(flat: Tensor, residual: Tensor | None, matrices: FactorRuns, q: Tensor, p: Tensor) -> None:
    """Computes P of every matrix; one product for all matrices of a shape that lie at even distances."""
    if residual is not None:
        spans = _spans(matrices)
        torch._foreach_add_([flat[i:j] for i, j in spans], [residual[i:j] for i, j in spans])
    for first, count, (step, p_step, q_step) in _batches(matrices):
        if count == 1:
            torch.mm(first.q(q), first.matrix(flat).t(), out=first.p(p))
            continue
        torch.bmm(
            _stacked(q, first.q_start, count, q_step, first.rank, first.columns),
            _stacked(flat, first.start, count, step, first.rows, first.columns).transpose(1, 2),
            out=_stacked(p, first.p_start, count, p_step, first.rank, first.rows),
        )


def powersgd_back_project_many(flat: Tensor, matrices: FactorRuns, p: Tensor, q: Tensor) -> None:
    """Computes Q of every matrix; one product for all matrices of a shape at even distances."""
    for first, count, (step, p_step, q_step) in _batches(matrices):
        if count == 1:
            torch.mm(first.p(p), first.matrix(flat), out=first.q(q))
            continue
        torch.bmm(
            _stacked(p, first.p_start, count, p_step, first.rank, first.rows),
            _stacked(flat, first.start, count, step, first.rows, first.columns),
            out=_stacked(q, first.q_start, count, q_step, first.rank, first.columns),
        )


def powersgd_restore_many(
    flat: Tensor, new_residual: Tensor | None, matrices: FactorRuns, p: Tensor, q_own: Tensor, q_sum: Tensor
) -> None:
    """Replaces every matrix by its approximation, and stores its compression error; one launch.

    Raises:
        ValueError: A tensor has another device, dtype or numel, or a matrix or factor is outside its buffer.
    """
    if not matrices.runs:
        return
    device = flat.device
    check_tensors(device, flat.numel(), torch.float32, flat=flat, new_residual=new_residual)
    check_tensors(device, p.numel(), torch.float32, p=p)
    check_tensors(device, q_sum.numel(), torch.float32, q_own=q_own, q_sum=q_sum)
    words, units, ends = _factor_table(matrices)
    if any(end > given.numel() for end, given in zip(ends, (flat, p, q_sum), strict=True)):
        raise ValueError(
            f"`matrices` reach to {ends} in `flat`, `p` and `q_sum`, which have {flat.numel()}, {p.numel()} and "
            f"{q_sum.numel()} elements"
        )
    table = cuda_launch.upload(words, device)
    cuda_launch.launch(
        "powersgd",
        "powersgd_restore",
        device,
        cuda_launch.blocks_for(device, 32 * units),
        (
            table.data_ptr(),
            len(matrices.runs),
            units,
            flat.data_ptr(),
            address(new_residual),
            p.data_ptr(),
            q_own.data_ptr(),
            q_sum.data_ptr(),
        ),
    )


@functools.lru_cache(maxsize=1024)
def _one(rows: int, columns: int, rank: int) -> FactorRuns:
    return FactorRuns((FactorRun(0, rows, columns, rank, 0, 0),))


def powersgd_restore(matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor) -> None:
    """Replaces one matrix by its approximation, and stores its compression error."""
    (rows, columns), rank, device = matrix.shape, len(p), matrix.device
    check_tensors(device, rows * columns, torch.float32, matrix=matrix, new_residual=new_residual)
    check_tensors(device, rank * rows, torch.float32, p=p)
    check_tensors(device, rank * columns, torch.float32, q_own=q_own, q_sum=q_sum)
    rest = None if new_residual is None else new_residual.view(-1)
    powersgd_restore_many(matrix.view(-1), rest, _one(rows, columns, rank), p.view(-1), q_own.view(-1), q_sum.view(-1))
