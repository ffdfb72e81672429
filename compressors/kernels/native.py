"""The compiled CPU kernels, called with tensors: each function has a twin in compressors/kernels/reference/.

Each checks its tensors first (ValueError), and passes addresses to gradwire._native (csrc/cpu).
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from gradwire.compressors.compiled import native as _native
from gradwire.compressors.kernels.block import BlockFormat
from gradwire.compressors.kernels.reference import DgcRule, DgcState
from gradwire.compressors.kernels.reference.dgc import step_each, sum_each
from gradwire.compressors.kernels.reference.powersgd import back_project_each, project_each, restore_each


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(numel: int, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Refuses what a kernel would read or write wrongly.

    Raises:
        ValueError: A tensor is not on the CPU, not contiguous, or not of this numel and dtype.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"`{name}` is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                f"wanted {numel} contiguous elements of {dtype} on the CPU"
            )


def _check_rows(name: str, rows: Tensor, nbytes: int) -> None:
    """Refuses payloads whose rows are shorter than a kernel reads.

    Raises:
        ValueError: `rows` is not 2-D, not on the CPU, or its rows are shorter than `nbytes` or not contiguous.
    """
    long_enough = rows.dim() == 2 and rows.shape[1] * rows.element_size() >= nbytes
    if not long_enough or rows.stride(1) != 1 or not rows.is_cpu:
        raise ValueError(
            f"`{name}` is {tuple(rows.shape)} {rows.dtype} on {rows.device}; "
            f"wanted rows of at least {nbytes} contiguous bytes on the CPU"
        )


def _check_pieces(codec: BlockFormat, payloads: Tensor, width: int, numel: int) -> None:
    """Refuses payloads that have fewer rows than there are pieces, or shorter ones than a kernel reads or writes.

    Raises:
        ValueError: `payloads` has too few or too short rows, or another dtype than uint8; or `width` is below 1 though
            there are elements.
    """
    _check_rows("payloads", payloads, codec.wire_nbytes(min(width, numel)))
    if (numel and width < 1) or len(payloads) * width < numel or payloads.dtype != torch.uint8:
        raise ValueError(
            f"`payloads` has {len(payloads)} rows of {payloads.dtype} for {numel} elements in pieces of {width}; "
            "wanted a row of uint8 for each piece"
        )


@lru_cache(maxsize=1024)
def _loops_of(codec: BlockFormat) -> _native.BlockFormat:
    return _native.block_format(codec.family, codec.parameters)


def encode_pieces(
    codec: BlockFormat,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """Encodes each run of `width` elements of gradient + residual into its row of `payloads`, in C++."""
    numel = gradient.numel()
    _check(numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check_pieces(codec, payloads, width, numel)
    _loops_of(codec).encode_pieces(
        gradient.data_ptr(),
        _address(residual),
        _address(new_residual),
        payloads.data_ptr(),
        payloads.stride(0),
        width,
        numel,
    )


def decode_pieces(codec: BlockFormat, payloads: Tensor, target: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements of `target`, in C++."""
    numel = target.numel()
    _check(numel, torch.float32, target=target)
    _check_pieces(codec, payloads, width, numel)
    _loops_of(codec).decode_pieces(payloads.data_ptr(), payloads.stride(0), target.data_ptr(), width, numel)


def decode_reduce(codec: BlockFormat, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """Writes `addend` plus the decoded payloads, added in their order, into `target`, in C++."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("payloads", payloads, codec.wire_nbytes(target.numel()))
    _loops_of(codec).decode_reduce(
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(addend),
        target.data_ptr(),
        target.numel(),
    )


def reduce_encode(
    codec: BlockFormat,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """Encodes the sum of the decoded payloads plus `residual` into `reduced`, in C++."""
    nbytes = codec.wire_nbytes(numel)
    _check(numel, torch.float32, residual=residual, new_residual=new_residual)
    _check(nbytes, torch.uint8, reduced=reduced)
    _check_rows("payloads", payloads, nbytes)
    _loops_of(codec).reduce_encode(
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(residual),
        _address(new_residual),
        reduced.data_ptr(),
        numel,
    )


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """Updates DGC's momentum and total, and moves the k largest totals out of them, in C++."""
    numel, k = gradient.numel(), indices.numel()
    _check(
        numel,
        torch.float32,
        gradient=gradient,
        velocity=state.velocity,
        total=state.total,
        velocity_out=state.velocity_out,
        total_out=state.total_out,
    )
    _check(k, torch.int32, indices=indices)
    _check(k, torch.float32, values=values)
    _native.dgc_step(
        gradient.data_ptr(),
        state.velocity.data_ptr(),
        state.total.data_ptr(),
        state.velocity_out.data_ptr(),
        state.total_out.data_ptr(),
        numel,
        rule.momentum,
        rule.scale,
        rule.nesterov,
        k,
        indices.data_ptr(),
        values.data_ptr(),
    )


dgc_step_many = partial(step_each, dgc_step)
"""See `reference.dgc_step_many`."""


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """Adds `values` to `target` at `indices`, in place, in their order, in C++.

    Raises:
        IndexError: An index is outside `target`; nothing was added.
    """
    _check(indices.numel(), torch.int32, indices=indices)
    _check(indices.numel(), torch.float32, values=values)
    _check(target.numel(), torch.float32, target=target)
    _native.scatter_add(indices.data_ptr(), values.data_ptr(), indices.numel(), target.data_ptr(), target.numel())


dgc_sum = partial(sum_each, scatter_add)
"""See `reference.dgc_sum`. An index outside `target` raises IndexError; what came before it was added."""


def powersgd_project(matrix: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
    """Adds the residual to a matrix in place, and computes its factor P from Q."""
    (rows, columns), rank = matrix.shape, len(q)
    _check(rows * columns, torch.float32, matrix=matrix, residual=residual)
    _check(rank * columns, torch.float32, q=q)
    _check(rank * rows, torch.float32, p=p)
    _native.powersgd_project(matrix.data_ptr(), _address(residual), rows, columns, rank, q.data_ptr(), p.data_ptr())


def powersgd_back_project(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """Computes the factor Q of a matrix from its orthonormal P."""
    (rows, columns), rank = matrix.shape, len(q)
    _check(rows * columns, torch.float32, matrix=matrix)
    _check(rank * columns, torch.float32, q=q)
    _check(rank * rows, torch.float32, p=p)
    _native.powersgd_back_project(matrix.data_ptr(), rows, columns, rank, p.data_ptr(), q.data_ptr())


def powersgd_restore(matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor) -> None:
    """Replaces a matrix by its approximation, and stores its compression error, in C++."""
    (rows, columns), rank = matrix.shape, len(p)
    _check(rows * columns, torch.float32, matrix=matrix, new_residual=new_residual)
    _check(rank * rows, torch.float32, p=p)
    _check(rank * columns, torch.float32, q_own=q_own, q_sum=q_sum)
    _native.powersgd_restore(
        matrix.data_ptr(), _address(new_residual), rows, columns, rank, p.data_ptr(), q_own.data_ptr(), q_sum.data_ptr()
    )


powersgd_project_many = partial(project_each, powersgd_project)
"""See `reference.powersgd_project_many`."""
powersgd_back_project_many = partial(back_project_each, powersgd_back_project)
"""See `reference.powersgd_back_project_many`."""
powersgd_restore_many = partial(restore_each, powersgd_restore)
"""See `reference.powersgd_restore_many`."""


def orthogonalize(matrix: Tensor, key: int) -> None:
    """Makes the rows of a matrix orthonormal, in place, in C++; random rows replace dependent ones."""
    _check(matrix.numel(), torch.float32, matrix=matrix)
    _native.orthogonalize(matrix.data_ptr(), matrix.shape[0], matrix.shape[1], key)


def orthogonalize_many(matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
    """Runs `orthogonalize` on one matrix after the other."""
    for matrix, key in zip(matrices, keys, strict=True):
        orthogonalize(matrix, key)
