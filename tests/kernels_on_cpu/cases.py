"""One call of every CUDA kernel's wrapper, for CUDA's kernels and their twins of kernels/reference alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.kernels import cuda, reference
from gradwire.compressors.kernels.cuda.pack import PackTable
from gradwire.compressors.kernels.reference import ChunkRule, DgcRule, DgcRun, DgcState, FactorRun, FactorRuns
from gradwire.compressors.kernels.reference import pack as reference_pack

Case = Callable[[Any, torch.device], list[Tensor]]
"""Calls a wrapper of `cuda` or of `reference`, on tensors of a device; returns what it wrote."""

NUMEL = 9001
"""Some CTAs of most kernels, and a tail that fills none of their units."""
_WORKERS = 3
_WIDTH = 2240
_TOPK = ChunkRule(1024, 40, 0.5)


def _randn(device: torch.device, numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


def _codec(
    stage: str, first: tuple[object, ...], last: tuple[object, ...], nbytes: Callable[[int], int]
) -> dict[str, Case]:
    """The four kernels of a codec that reads and writes payloads of bytes."""

    def rows(of: Any, device: torch.device) -> Tensor:
        made = torch.zeros(_WORKERS, nbytes(NUMEL) + 1, dtype=torch.uint8, device=device)[:, :-1]
        encode = getattr(reference, f"{stage}_encode_pieces")
        for worker in range(_WORKERS):
            payload = torch.zeros(1, nbytes(NUMEL), dtype=torch.uint8)
            encode(*first, _randn(torch.device("cpu"), NUMEL, worker), None, None, payload, NUMEL, *last)
            made[worker].copy_(payload[0])
        return made

    def encode(of: Any, device: torch.device) -> list[Tensor]:
        payloads = torch.zeros(-(-NUMEL // _WIDTH), nbytes(_WIDTH) + 1, dtype=torch.uint8, device=device)
        left = torch.zeros(NUMEL, device=device)
        gradient, residual = _randn(device, NUMEL, 5), _randn(device, NUMEL, 6)
        getattr(of, f"{stage}_encode_pieces")(*first, gradient, residual, left, payloads, _WIDTH, *last)
        return [payloads, left]

    def decode_pieces(of: Any, device: torch.device) -> list[Tensor]:
        payloads = encode(reference, torch.device("cpu"))[0].to(device)
        target = torch.zeros(NUMEL, device=device)
        getattr(of, f"{stage}_decode_pieces")(*first, payloads, target, _WIDTH)
        return [target]

    def decode_reduce(of: Any, device: torch.device) -> list[Tensor]:
        target = torch.zeros(NUMEL, device=device)
        getattr(of, f"{stage}_decode_reduce")(*first, rows(of, device), _randn(device, NUMEL, 7), target)
        return [target]

    def reduce_encode(of: Any, device: torch.device) -> list[Tensor]:
        reduced, left = torch.zeros(nbytes(NUMEL), dtype=torch.uint8, device=device), torch.zeros(NUMEL, device=device)
        residual = _randn(device, NUMEL, 8)
        getattr(of, f"{stage}_reduce_encode")(*first, rows(of, device), residual, left, reduced, NUMEL, *last)
        return [reduced, left]

    name = "_".join([stage, *map(str, (each for each in first if isinstance(each, int)))])
    stages = (encode, decode_pieces, decode_reduce, reduce_encode)
    return {f"{name} {each.__name__}": each for each in stages}


def _cast(dtype: torch.dtype) -> dict[str, Case]:
    def encode(of: Any, device: torch.device) -> list[Tensor]:
        left, target = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, dtype=dtype, device=device)
        of.cast_encode(_randn(device, NUMEL, 1), 0.5, _randn(device, NUMEL, 2), left, target)
        return [left, target]

    def sources(device: torch.device) -> Tensor:
        return _randn(device, _WORKERS * NUMEL, 3).view(_WORKERS, NUMEL).to(dtype)

    def decode_reduce(of: Any, device: torch.device) -> list[Tensor]:
        target = torch.zeros(NUMEL, device=device)
        of.cast_decode_reduce(sources(device), _randn(device, NUMEL, 4), target)
        return [target]

    def reduce_encode(of: Any, device: torch.device) -> list[Tensor]:
        left, reduced = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, dtype=dtype, device=device)
        of.cast_reduce_encode(sources(device), _randn(device, NUMEL, 2), left, reduced)
        return [left, reduced]

    return {f"{dtype} {each.__name__}": each for each in (encode, decode_reduce, reduce_encode)}


def _dgc_step(runs: list[DgcRun], flat: bool) -> Case:
    def step(of: Any, device: torch.device) -> list[Tensor]:
        numel, chosen = sum(run.numel for run in runs), sum(run.count for run in runs)
        velocity, total = _randn(device, numel, 2), _randn(device, numel, 3)
        state = DgcState(velocity, total, torch.zeros_like(velocity), torch.zeros_like(total))
        indices = torch.zeros(chosen, dtype=torch.int32, device=device)
        values = torch.zeros(chosen, device=device)
        gradient = torch.ones(numel, device=device) if flat else _randn(device, numel, 1)
        if flat:
            velocity.zero_(), total.zero_()
        of.dgc_step_many(gradient, state, DgcRule(0.9), None, runs, indices, values)
        return [indices, values, state.velocity_out, state.total_out]

    return step


def _dgc_sum(dtype: torch.dtype) -> Case:
    def add(of: Any, device: torch.device) -> list[Tensor]:
        count, rows = NUMEL // 4, []
        for worker in range(_WORKERS):
            generator = torch.Generator().manual_seed(worker)
            places = torch.randperm(NUMEL, generator=generator)[:count].sort().values.to(torch.int32)
            values = torch.randn(count, generator=generator).to(dtype)
            rows.append(torch.cat([places.view(torch.uint8), values.view(torch.uint8)]))
        target = torch.zeros(NUMEL, device=device)
        of.dgc_sum(torch.stack(rows).to(device), count, dtype, target)
        return [target]

    return add


def _scatter_add(of: Any, device: torch.device) -> list[Tensor]:
    target = _randn(device, NUMEL, 4)
    places = torch.randint(NUMEL, (NUMEL // 3,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    # Where a place occurs several times the additions come in any order: these sums are exact.
    target.round_()
    of.scatter_add(places.to(device), _randn(device, NUMEL // 3, 5).round(), target)
    return [target]


def _orthogonalize(of: Any, device: torch.device) -> list[Tensor]:
    matrices = [_randn(device, 4 * columns, columns).view(4, columns) for columns in (50, 2100)]
    of.orthogonalize_many(matrices, [0, 1])
    return matrices


def _restore(of: Any, device: torch.device) -> list[Tensor]:
    shapes, runs, start, p_start, q_start = ((16, 24, 2), (5, 1100, 1), (33, 70, 3)), [], 0, 0, 0
    for rows, columns, rank in shapes:
        runs.append(FactorRun(start, rows, columns, rank, p_start, q_start))
        start, p_start, q_start = start + rows * columns, p_start + rank * rows, q_start + rank * columns
    flat, left = _randn(device, start, 1), torch.zeros(start, device=device)
    p, own, total = _randn(device, p_start, 2), _randn(device, q_start, 3), _randn(device, q_start, 4)
    of.powersgd_restore_many(flat, left, FactorRuns(tuple(runs)), p, own, total)
    return [flat, left]


def _pack(tensor_dtype: torch.dtype, bucket_dtype: torch.dtype) -> dict[str, Case]:
    shapes, offsets = ((70, 120), (7,), (20_001,)), [2, 8402, 8411]

    def given(device: torch.device) -> list[Tensor]:
        return [_randn(device, torch.Size(s).numel(), i).view(s).to(tensor_dtype) for i, s in enumerate(shapes)]

    def pack(of: Any, device: torch.device) -> list[Tensor]:
        bucket = torch.zeros(28_500, dtype=bucket_dtype, device=device)
        if of is cuda:
            PackTable(given(device), offsets, 0.5).pack(bucket)
        else:
            reference_pack.pack(given(device), offsets, 0.5, bucket)
        return [bucket]

    def unpack(of: Any, device: torch.device) -> list[Tensor]:
        bucket, tensors = _randn(device, 28_500, 9).to(bucket_dtype), given(device)
        if of is cuda:
            PackTable(tensors, offsets, 0.5).unpack(bucket)
        else:
            reference_pack.unpack(tensors, offsets, 0.5, bucket)
        return tensors

    return {f"{each.__name__} {tensor_dtype} {bucket_dtype}": each for each in (pack, unpack)}


_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)

CASES: dict[str, Case] = {
    **{name: case for dtype in _HALVES for name, case in _cast(dtype).items()},
    **_codec("onebit", (), (), reference.onebit_nbytes),
    **_codec("quantize", (8,), (11,), lambda numel: reference.quantize_nbytes(numel, 8)),
    **_codec("quantize", (4,), (None,), lambda numel: reference.quantize_nbytes(numel, 4)),
    **_codec("waterfill", (5,), (), lambda numel: reference.waterfill_nbytes(numel, 5)),
    **_codec("chunk_topk", (_TOPK,), (), lambda numel: reference.chunk_topk_nbytes(numel, _TOPK)),
    "dgc step": _dgc_step([DgcRun(0, 100_000, 300), DgcRun(100_000, 33, 2), DgcRun(100_033, 5000, 2500)], False),
    "dgc step among equals": _dgc_step([DgcRun(0, 9001, 1700)], True),
    **{f"dgc sum {dtype}": _dgc_sum(dtype) for dtype in _FLOATS},
    "scatter add": _scatter_add,
    "orthogonalize": _orthogonalize,
    "restore": _restore,
    **{name: case for one in _FLOATS for other in _FLOATS for name, case in _pack(one, other).items()},
}
"""By name; together they start every kernel of csrc/cuda."""

APPROXIMATE = {"orthogonalize"}
"""Cases whose sums CUDA makes in another order than the reference; the same one each time."""
