"""The compiled CPU kernels behind tensors: each function is the twin of the one in compressors/kernels/reference/.

Each checks its tensors first (ValueError), and passes addresses to gradwire._native (csrc/cpu). One file, because each
file that a bucket passes is one more for a reader of its path (tests/comms/test_bucket_path.py).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from gradwire import _native
from gradwire.compressors.kernels.reference import (
    EXPONENTS_BLOCK,
    ChunkRule,
    DgcRule,
    DgcRun,
    DgcState,
    chunk_topk_nbytes,
    exponents_most_nbytes,
    onebit_nbytes,
    quantize_nbytes,
    waterfill_nbytes,
)
from gradwire.compressors.kernels.reference.dgc import step_each, sum_each
from gradwire.compressors.kernels.reference.powersgd import (
    FactorRuns,
    back_project_each,
    project_each,
    restore_each,
)

_INTERFACE = 1
"""Of the payloads' bytes and the functions' parameters, as these files know them; csrc/cpu/bind.cpp has the same."""

if (_compiled := getattr(_native, "INTERFACE", None)) != _INTERFACE:  # one built before there were numbers has none
    raise RuntimeError(
        f"`gradwire._native` ({_native.__file__}) was compiled from other sources than these Python files: found "
        f"interface {_compiled}, wanted {_INTERFACE}; rebuild it: `pip install -e .` in the checkout"
    )


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


def _check_pieces(payloads: Tensor, nbytes: int, width: int, numel: int) -> None:
    """Refuses payloads that have fewer rows than there are pieces, or shorter ones than a kernel reads or writes.

    Raises:
        ValueError: See above and `_check_rows`; or `width` is no number of elements, where there are some.
    """
    _check_rows("payloads", payloads, nbytes)
    if (numel and width < 1) or len(payloads) * width < numel or payloads.dtype != torch.uint8:
        raise ValueError(
            f"`payloads` has {len(payloads)} rows of {payloads.dtype} for {numel} elements in pieces of {width}; "
            "wanted a row of uint8 for each piece"
        )


def _encode_each(
    encode: Callable[[Tensor, Tensor | None, Tensor | None, Tensor], None],
    wire_nbytes: Callable[[int], int],
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """As reference.pieces.encode_each, which the path of a bucket does not enter."""
    runs = torch.split(gradient, width), _split(residual, width), _split(new_residual, width)
    for row, piece, old, new in zip(payloads, *runs, strict=False):
        encode(piece, old, new, row[: wire_nbytes(piece.numel())])


def _decode_each(
    decode: Callable[[Tensor, Tensor], None],
    wire_nbytes: Callable[[int], int],
    payloads: Tensor,
    target: Tensor,
    width: int,
) -> None:
    """As reference.pieces.decode_each."""
    for row, piece in zip(payloads, torch.split(target, width), strict=False):
        decode(row[: wire_nbytes(piece.numel())], piece)


def _split(flat: Tensor | None, width: int) -> Iterable[Tensor | None]:
    return repeat(None) if flat is None else torch.split(flat, width)


def cast_encode(
    gradient: Tensor, scale: float, residual: Tensor | None, new_residual: Tensor | None, target: Tensor
) -> None:
    """See reference.cast_encode."""
    _check(gradient.numel(), torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check(gradient.numel(), target.dtype, target=target)
    _native.cast_encode(
        target.dtype == torch.float16,
        gradient.data_ptr(),
        scale,
        _address(residual),
        _address(new_residual),
        target.data_ptr(),
        gradient.numel(),
    )


def cast_decode_reduce(sources: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.cast_decode_reduce."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("sources", sources, 2 * target.numel())
    _native.cast_decode_reduce(
        sources.dtype == torch.float16,
        sources.data_ptr(),
        sources.stride(0),
        len(sources),
        _address(addend),
        target.data_ptr(),
        target.numel(),
    )


def cast_reduce_encode(sources: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor) -> None:
    """See reference.cast_reduce_encode."""
    total = torch.empty(reduced.numel())
    cast_decode_reduce(sources, None, total)
    cast_encode(total, 1.0, residual, new_residual, reduced)


def exponents_pack(blocks: Tensor, payload: Tensor) -> int:
    """See reference.exponents_pack."""
    _check_blocks(blocks)
    _check_rows("payload", payload.unsqueeze(0), exponents_most_nbytes(blocks.numel()))
    return _native.exponents_pack(blocks.data_ptr(), blocks.stride(0), len(blocks), payload.data_ptr())


def exponents_unpack(payload: Tensor, blocks: Tensor) -> None:
    """See reference.exponents_unpack."""
    _check_blocks(blocks)
    _check_rows("payload", payload.unsqueeze(0), 0)
    _native.exponents_unpack(payload.data_ptr(), payload.numel(), blocks.data_ptr(), blocks.stride(0), len(blocks))


def _check_blocks(blocks: Tensor) -> None:
    """Refuses what is not blocks of 64 bfloat16.

    Raises:
        ValueError: `blocks` is of another shape or dtype, or not on the CPU.
    """
    shaped = blocks.dim() == 2 and blocks.shape[1] == EXPONENTS_BLOCK and blocks.stride(1) == 1
    if not shaped or blocks.dtype != torch.bfloat16 or not blocks.is_cpu:
        raise ValueError(
            f"`blocks` is {tuple(blocks.shape)} {blocks.dtype} on {blocks.device}; "
            f"wanted rows of {EXPONENTS_BLOCK} contiguous bfloat16 on the CPU"
        )


def onebit_encode(gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor) -> None:
    """See reference.onebit_encode."""
    _check(gradient.numel(), torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check(onebit_nbytes(gradient.numel()), torch.uint8, payload=payload)
    _native.onebit_encode(
        gradient.data_ptr(), _address(residual), _address(new_residual), payload.data_ptr(), gradient.numel()
    )


def onebit_encode_pieces(
    gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """See reference.onebit_encode_pieces."""
    _encode_each(onebit_encode, onebit_nbytes, gradient, residual, new_residual, payloads, width)


def onebit_decode_reduce(payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.onebit_decode_reduce."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("payloads", payloads, onebit_nbytes(target.numel()))
    _native.onebit_decode_reduce(
        payloads.data_ptr(), payloads.stride(0), len(payloads), _address(addend), target.data_ptr(), target.numel()
    )


def onebit_decode_pieces(payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.onebit_decode_pieces."""
    _decode_each(
        lambda row, piece: onebit_decode_reduce(row[None], None, piece), onebit_nbytes, payloads, target, width
    )


def onebit_reduce_encode(
    payloads: Tensor, residual: Tensor | None, new_residual: Tensor | None, reduced: Tensor, numel: int
) -> None:
    """See reference.onebit_reduce_encode."""
    _check(numel, torch.float32, residual=residual, new_residual=new_residual)
    _check(onebit_nbytes(numel), torch.uint8, reduced=reduced)
    _check_rows("payloads", payloads, onebit_nbytes(numel))
    _native.onebit_reduce_encode(
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(residual),
        _address(new_residual),
        reduced.data_ptr(),
        numel,
    )


def quantize_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor, key: int | None
) -> None:
    """See reference.quantize_encode."""
    _check(gradient.numel(), torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check(quantize_nbytes(gradient.numel(), bits), torch.uint8, payload=payload)
    _native.quantize_encode(
        bits,
        gradient.data_ptr(),
        _address(residual),
        _address(new_residual),
        payload.data_ptr(),
        gradient.numel(),
        key is not None,
        key or 0,
    )


def quantize_encode_pieces(
    bits: int,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
    key: int | None,
) -> None:
    """See reference.quantize_encode_pieces."""
    _encode_each(
        partial(quantize_encode, bits, key=key),
        partial(quantize_nbytes, bits=bits),
        gradient,
        residual,
        new_residual,
        payloads,
        width,
    )


def quantize_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.quantize_decode_reduce."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("payloads", payloads, quantize_nbytes(target.numel(), bits))
    _native.quantize_decode_reduce(
        bits,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(addend),
        target.data_ptr(),
        target.numel(),
    )


def quantize_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.quantize_decode_pieces."""
    _decode_each(
        lambda row, piece: quantize_decode_reduce(bits, row[None], None, piece),
        partial(quantize_nbytes, bits=bits),
        payloads,
        target,
        width,
    )


def quantize_reduce_encode(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
    key: int | None,
) -> None:
    """See reference.quantize_reduce_encode."""
    _check(numel, torch.float32, residual=residual, new_residual=new_residual)
    _check(quantize_nbytes(numel, bits), torch.uint8, reduced=reduced)
    _check_rows("payloads", payloads, quantize_nbytes(numel, bits))
    _native.quantize_reduce_encode(
        bits,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(residual),
        _address(new_residual),
        reduced.data_ptr(),
        numel,
        key is not None,
        key or 0,
    )


def waterfill_encode(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
) -> None:
    """See reference.waterfill_encode."""
    _check(gradient.numel(), torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check(waterfill_nbytes(gradient.numel(), bits), torch.uint8, payload=payload)
    _native.waterfill_encode(
        bits,
        gradient.data_ptr(),
        _address(residual),
        _address(new_residual),
        payload.data_ptr(),
        gradient.numel(),
    )


def waterfill_encode_pieces(
    bits: int, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payloads: Tensor, width: int
) -> None:
    """See reference.waterfill_encode_pieces."""
    numel = gradient.numel()
    _check(numel, torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check_pieces(payloads, waterfill_nbytes(min(width, numel), bits), width, numel)
    _native.waterfill_encode_pieces(
        bits,
        gradient.data_ptr(),
        _address(residual),
        _address(new_residual),
        payloads.data_ptr(),
        payloads.stride(0),
        width,
        numel,
    )


def waterfill_decode_reduce(bits: int, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.waterfill_decode_reduce."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("payloads", payloads, waterfill_nbytes(target.numel(), bits))
    _native.waterfill_decode_reduce(
        bits,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(addend),
        target.data_ptr(),
        target.numel(),
    )


def waterfill_decode_pieces(bits: int, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.waterfill_decode_pieces."""
    numel = target.numel()
    _check(numel, torch.float32, target=target)
    _check_pieces(payloads, waterfill_nbytes(min(width, numel), bits), width, numel)
    _native.waterfill_decode_pieces(bits, payloads.data_ptr(), payloads.stride(0), target.data_ptr(), width, numel)


def waterfill_reduce_encode(
    bits: int,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """See reference.waterfill_reduce_encode."""
    _check(numel, torch.float32, residual=residual, new_residual=new_residual)
    _check(waterfill_nbytes(numel, bits), torch.uint8, reduced=reduced)
    _check_rows("payloads", payloads, waterfill_nbytes(numel, bits))
    _native.waterfill_reduce_encode(
        bits,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(residual),
        _address(new_residual),
        reduced.data_ptr(),
        numel,
    )


def chunk_topk_encode(
    rule: ChunkRule, gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
) -> None:
    """See reference.chunk_topk_encode."""
    _check(gradient.numel(), torch.float32, gradient=gradient, residual=residual, new_residual=new_residual)
    _check(chunk_topk_nbytes(gradient.numel(), rule), torch.uint8, payload=payload)
    _native.chunk_topk_encode(
        rule.chunk,
        rule.keep,
        rule.decay,
        gradient.data_ptr(),
        _address(residual),
        _address(new_residual),
        payload.data_ptr(),
        gradient.numel(),
    )


def chunk_topk_encode_pieces(
    rule: ChunkRule,
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    payloads: Tensor,
    width: int,
) -> None:
    """See reference.chunk_topk_encode_pieces."""
    _encode_each(
        partial(chunk_topk_encode, rule),
        lambda numel: chunk_topk_nbytes(numel, rule),
        gradient,
        residual,
        new_residual,
        payloads,
        width,
    )


def chunk_topk_decode_reduce(rule: ChunkRule, payloads: Tensor, addend: Tensor | None, target: Tensor) -> None:
    """See reference.chunk_topk_decode_reduce."""
    _check(target.numel(), torch.float32, addend=addend, target=target)
    _check_rows("payloads", payloads, chunk_topk_nbytes(target.numel(), rule))
    _native.chunk_topk_decode_reduce(
        rule.chunk,
        rule.keep,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(addend),
        target.data_ptr(),
        target.numel(),
    )


def chunk_topk_decode_pieces(rule: ChunkRule, payloads: Tensor, target: Tensor, width: int) -> None:
    """See reference.chunk_topk_decode_pieces."""
    _decode_each(
        lambda row, piece: chunk_topk_decode_reduce(rule, row[None], None, piece),
        lambda numel: chunk_topk_nbytes(numel, rule),
        payloads,
        target,
        width,
    )


def chunk_topk_reduce_encode(
    rule: ChunkRule,
    payloads: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    reduced: Tensor,
    numel: int,
) -> None:
    """See reference.chunk_topk_reduce_encode."""
    _check(numel, torch.float32, residual=residual, new_residual=new_residual)
    _check(chunk_topk_nbytes(numel, rule), torch.uint8, reduced=reduced)
    _check_rows("payloads", payloads, chunk_topk_nbytes(numel, rule))
    _native.chunk_topk_reduce_encode(
        rule.chunk,
        rule.keep,
        rule.decay,
        payloads.data_ptr(),
        payloads.stride(0),
        len(payloads),
        _address(residual),
        _address(new_residual),
        reduced.data_ptr(),
        numel,
    )


def dgc_step(gradient: Tensor, state: DgcState, rule: DgcRule, indices: Tensor, values: Tensor) -> None:
    """See reference.dgc_step."""
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


def dgc_step_many(
    gradient: Tensor,
    state: DgcState,
    rule: DgcRule,
    scales: Tensor | None,
    runs: Sequence[DgcRun],
    indices: Tensor,
    values: Tensor,
) -> None:
    """See reference.dgc_step_many."""
    step_each(dgc_step, gradient, state, rule, scales, runs, indices, values)


def dgc_sum(payloads: Tensor, count: int, value_dtype: torch.dtype, target: Tensor) -> None:
    """See reference.dgc_sum.

    Raises:
        IndexError: An index is outside `target`; what came before it was added.
    """
    sum_each(scatter_add, payloads, count, value_dtype, target)


def scatter_add(indices: Tensor, values: Tensor, target: Tensor) -> None:
    """See reference.scatter_add.

    Raises:
        IndexError: An index is outside `target`; nothing was added.
    """
    _check(indices.numel(), torch.int32, indices=indices)
    _check(indices.numel(), torch.float32, values=values)
    _check(target.numel(), torch.float32, target=target)
    _native.scatter_add(indices.data_ptr(), values.data_ptr(), indices.numel(), target.data_ptr(), target.numel())


def powersgd_project(matrix: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
    """See reference.powersgd_project."""
    (rows, columns), rank = matrix.shape, len(q)
    _check(rows * columns, torch.float32, matrix=matrix, residual=residual)
    _check(rank * columns, torch.float32, q=q)
    _check(rank * rows, torch.float32, p=p)
    _native.powersgd_project(matrix.data_ptr(), _address(residual), rows, columns, rank, q.data_ptr(), p.data_ptr())


def powersgd_back_project(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """See reference.powersgd_back_project."""
    (rows, columns), rank = matrix.shape, len(q)
    _check(rows * columns, torch.float32, matrix=matrix)
    _check(rank * columns, torch.float32, q=q)
    _check(rank * rows, torch.float32, p=p)
    _native.powersgd_back_project(matrix.data_ptr(), rows, columns, rank, p.data_ptr(), q.data_ptr())


def powersgd_restore(matrix: Tensor, new_residual: Tensor | None, p: Tensor, q_own: Tensor, q_sum: Tensor) -> None:
    """See reference.powersgd_restore."""
    (rows, columns), rank = matrix.shape, len(p)
    _check(rows * columns, torch.float32, matrix=matrix, new_residual=new_residual)
    _check(rank * rows, torch.float32, p=p)
    _check(rank * columns, torch.float32, q_own=q_own, q_sum=q_sum)
    _native.powersgd_restore(
        matrix.data_ptr(), _address(new_residual), rows, columns, rank, p.data_ptr(), q_own.data_ptr(), q_sum.data_ptr()
    )


def powersgd_project_many(flat: Tensor, residual: Tensor | None, matrices: FactorRuns, q: Tensor, p: Tensor) -> None:
    """See reference.powersgd_project_many."""
    project_each(powersgd_project, flat, residual, matrices, q, p)


def powersgd_back_project_many(flat: Tensor, matrices: FactorRuns, p: Tensor, q: Tensor) -> None:
    """See reference.powersgd_back_project_many."""
    back_project_each(powersgd_back_project, flat, matrices, p, q)


def powersgd_restore_many(
    flat: Tensor, new_residual: Tensor | None, matrices: FactorRuns, p: Tensor, q_own: Tensor, q_sum: Tensor
) -> None:
    """See reference.powersgd_restore_many."""
    restore_each(powersgd_restore, flat, new_residual, matrices, p, q_own, q_sum)


def orthogonalize(matrix: Tensor, key: int) -> None:
    """See reference.orthogonalize."""
    _check(matrix.numel(), torch.float32, matrix=matrix)
    _native.orthogonalize(matrix.data_ptr(), matrix.shape[0], matrix.shape[1], key)


def orthogonalize_many(matrices: Sequence[Tensor], keys: Sequence[int]) -> None:
    """See reference.orthogonalize_many."""
    for matrix, key in zip(matrices, keys, strict=True):
        orthogonalize(matrix, key)


_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Format of csrc/cpu/kernels/pack.cpp."""


def _move(tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, bucket: Tensor, into_bucket: bool) -> None:
    """Moves tensors into or out of `bucket`.

    Raises:
        ValueError: A tensor is not contiguous, not on the CPU, of a dtype without a kernel, or reaches outside.
    """
    pieces = []
    for tensor, offset in zip((*tensors, bucket), (*offsets, 0), strict=True):
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.dtype not in _FORMATS:
            raise ValueError(
                f"`tensors` and `bucket` hold {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                f"wanted contiguous {', '.join(map(str, _FORMATS))} on the CPU"
            )
        if offset < 0 or offset + tensor.numel() > bucket.numel():
            raise ValueError(f"`offsets` place {tensor.numel()} elements at {offset}; `bucket` has {bucket.numel()}")
        pieces.append((tensor.data_ptr(), offset, tensor.numel(), _FORMATS[tensor.dtype]))
    address, _, _, bucket_format = pieces.pop()
    _native.move(pieces, scale, address, bucket_format, into_bucket)


def pack(tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, bucket: Tensor) -> None:
    """See reference.pack."""
    _move(tensors, offsets, scale, bucket, into_bucket=True)


def unpack(tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, bucket: Tensor) -> None:
    """See reference.unpack."""
    _move(tensors, offsets, scale, bucket, into_bucket=False)
