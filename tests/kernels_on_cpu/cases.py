"""One call of every CUDA kernel's wrapper, for CUDA's kernels and their twins of kernels/reference alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.codecs.base import BlockCodec
from gradwire.compressors.codecs.cast import CastCodec
from gradwire.compressors.codecs.onebit import OneBitCodec
from gradwire.compressors.codecs.quantize import QuantizeCodec
from gradwire.compressors.codecs.waterfill import WaterfillCodec
from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.reference import DgcRule, DgcRun, DgcState, FactorRun, FactorRuns

Case = Callable[[Any, torch.device], list[Tensor]]
"""Calls a wrapper of `cuda` or of `reference`, on tensors of a device; returns what it wrote."""

NUMEL = 9001
"""Some CTAs of most kernels, and a tail that fills none of their units."""
_WORKERS = 3
_WIDTH = 2240


def _randn(device: torch.device, numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


def _codec(codec: BlockCodec) -> dict[str, Case]:
    """The four kernels of a codec."""
    padding = 0 if codec.family == "cast" else 1

    def rows(device: torch.device) -> Tensor:
        made = torch.zeros(_WORKERS, codec.wire_nbytes(NUMEL) + 2, dtype=torch.uint8)[:, :-2]
        for worker, row in enumerate(made):
            codec.torch_encode(_randn(torch.device("cpu"), NUMEL, worker), row)
        return made.to(device)

    def encode(of: Any, device: torch.device) -> list[Tensor]:
        nbytes = codec.wire_nbytes(_WIDTH) + padding
        payloads = torch.zeros(-(-NUMEL // _WIDTH), nbytes, dtype=torch.uint8, device=device)
        left = torch.zeros(NUMEL, device=device)
        of.encode_pieces(codec, _randn(device, NUMEL, 5), _randn(device, NUMEL, 6), left, payloads, _WIDTH)
        return [payloads, left]

    def decode_pieces(of: Any, device: torch.device) -> list[Tensor]:
        payloads = encode(reference, torch.device("cpu"))[0].to(device)
        target = torch.zeros(NUMEL, device=device)
        of.decode_pieces(codec, payloads, target, _WIDTH)
        return [target]

    def decode_reduce(of: Any, device: torch.device) -> list[Tensor]:
        target = torch.zeros(NUMEL, device=device)
        of.decode_reduce(codec, rows(device), _randn(device, NUMEL, 7), target)
        return [target]

    def reduce_encode(of: Any, device: torch.device) -> list[Tensor]:
        reduced = torch.zeros(codec.wire_nbytes(NUMEL), dtype=torch.uint8, device=device)
        left = torch.zeros(NUMEL, device=device)
        of.reduce_encode(codec, rows(device), _randn(device, NUMEL, 8), left, reduced, NUMEL)
        return [reduced, left]

    name = " ".join([codec.family, *map(str, codec.parameters)])
    return {f"{name} {each.__name__}": each for each in (encode, decode_pieces, decode_reduce, reduce_encode)}


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


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_CODECS = (
    CastCodec("float16"),
    CastCodec("bfloat16"),
    OneBitCodec(),
    QuantizeCodec(8, 11),
    QuantizeCodec(4),
    WaterfillCodec(5),
)

CASES: dict[str, Case] = {
    **{name: case for codec in _CODECS for name, case in _codec(codec).items()},
    "dgc step": _dgc_step([DgcRun(0, 100_000, 300), DgcRun(100_000, 33, 2), DgcRun(100_033, 5000, 2500)], False),
    "dgc step among equals": _dgc_step([DgcRun(0, 9001, 1700)], True),
    **{f"dgc sum {dtype}": _dgc_sum(dtype) for dtype in _FLOATS},
    "scatter add": _scatter_add,
    "orthogonalize": _orthogonalize,
    "restore": _restore,
}
"""By name; together they start every kernel of csrc/cuda."""

APPROXIMATE = {"orthogonalize"}
"""Cases whose sums CUDA makes in another order than the reference; the same one each time."""
