"""Payloads of flat shards. A flat shard is the part of a parameter group's flat gradient or weights that one rank owns.

A payload holds the compressed runs of a flat shard (matrices) encoded by a codec, then the dense runs (vectors, small
matrices) unchanged, each part padded to `ALIGN_NBYTES`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comms.sharded.layout import ShardRuns
from gradwire.compressors.codecs.base import FusedCodec

ALIGN_NBYTES = 16
"""Alignment of payloads and of their parts, in bytes: any dtype can be viewed there, and kernels use wide loads."""


def payload_nbytes(codec: FusedCodec, runs: ShardRuns, dtype: torch.dtype) -> int:
    """Returns the size of a flat shard's payload in bytes.

    Args:
        codec: Codec of the compressed runs.
        runs: Compressed and dense runs of the flat shard.
        dtype: Dtype of the flat shard, in which dense runs are sent.
    """
    return _dense_at(codec, runs) + _aligned(runs.dense_numel * dtype.itemsize)


def encode(
    codec: FusedCodec,
    runs: ShardRuns,
    row: Tensor,
    payload: Tensor,
    *,
    residual: Tensor | None = None,
    sent: Tensor | None = None,
) -> None:
    """Encodes a flat shard into a payload.

    Args:
        codec: Codec of the compressed runs.
        runs: Compressed and dense runs of the flat shard.
        row: (runs.numel) floating-point; not changed.
        payload: (payload_nbytes) uint8, aligned to 16 bytes; overwritten.
        residual: (runs.compressed_numel) float32, added to the flat shard before it is encoded; overwritten with the
            compression error.
        sent: (runs.numel) float32 flat shard that the receivers already have; if given, compressed runs are encoded as
            differences from it.
    """
    used = codec.wire_nbytes(runs.compressed_numel)
    if runs.compressed_numel:
        compressed = gather_runs(row, runs.compressed).float()
        if sent is not None:
            compressed = compressed - gather_runs(sent, runs.compressed)
        codec.encode_residual(compressed, residual, residual, payload[:used])
    start = _dense_at(codec, runs)
    dense_nbytes = runs.dense_numel * row.element_size()
    if dense_nbytes:
        payload[start : start + dense_nbytes].view(row.dtype).copy_(gather_runs(row, runs.dense))
    # Clear the padding, so that no uninitialized memory of this process is sent.
    payload[used:start].zero_()
    payload[start + dense_nbytes :].zero_()


def decode(codec: FusedCodec, runs: ShardRuns, payloads: Tensor, dtype: torch.dtype, own: Tensor | None) -> Tensor:
    """Decodes the payloads that several ranks sent of one flat shard, and returns their sum.

    Args:
        codec: Codec of the compressed runs.
        runs: Compressed and dense runs of the flat shard.
        payloads: (ranks, payload_nbytes) uint8, contiguous.
        dtype: Dtype of the encoded flat shards.
        own: (runs.numel) contribution of this rank, added without being encoded; None for no contribution.

    Returns:
        The sum, (runs.numel) float32.
    """
    total = torch.empty(runs.numel, dtype=torch.float32, device=payloads.device)
    if runs.compressed_numel:
        compressed = torch.empty(runs.compressed_numel, dtype=torch.float32, device=payloads.device)
        addend = None if own is None else gather_runs(own, runs.compressed).float()
        codec.decode_reduce(payloads[:, : codec.wire_nbytes(runs.compressed_numel)], addend, compressed)
        scatter_runs(compressed, total, runs.compressed)
    if runs.dense_numel:
        start = _dense_at(codec, runs)
        rows = payloads[:, start : start + runs.dense_numel * dtype.itemsize].view(dtype)
        dense = rows.sum(0, dtype=torch.float32)
        if own is not None:
            dense.add_(gather_runs(own, runs.dense))
        scatter_runs(dense, total, runs.dense)
    return total


def add_payload(codec: FusedCodec, runs: ShardRuns, payload: Tensor, dtype: torch.dtype, sent: Tensor) -> None:
    """Updates a receiver's copy of a flat shard with a payload of differences.

    Args:
        codec: Codec of the compressed runs.
        runs: Compressed and dense runs of the flat shard.
        payload: (payload_nbytes) uint8: differences in the compressed runs, new values in the dense ones.
        dtype: Dtype of the encoded flat shard.
        sent: (runs.numel) float32 copy of the flat shard, changed in place. Ranks that apply the same payloads keep the
            same bits.
    """
    if runs.compressed_numel:
        had = gather_runs(sent, runs.compressed)
        new = torch.empty_like(had)
        codec.decode_reduce(payload[None, : codec.wire_nbytes(runs.compressed_numel)], had.contiguous(), new)
        scatter_runs(new, sent, runs.compressed)
    if runs.dense_numel:
        start = _dense_at(codec, runs)
        dense = payload[start : start + runs.dense_numel * dtype.itemsize].view(dtype)
        scatter_runs(dense.float(), sent, runs.dense)


def _dense_at(codec: FusedCodec, runs: ShardRuns) -> int:
    return _aligned(codec.wire_nbytes(runs.compressed_numel)) if runs.compressed_numel else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def gather_runs(row: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the elements of the runs (start, stop) of `row`, concatenated; a view if there is at most one run."""
    if not runs:
        return row[:0]
    if len(runs) == 1:
        return row[runs[0][0] : runs[0][1]]
    return torch.cat([row[start:stop] for start, stop in runs])


def scatter_runs(part: Tensor, row: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Writes the concatenated elements `part` to the runs (start, stop) of `row`; the inverse of `gather_runs`."""
    at = 0
    for start, stop in runs:
        row[start:stop] = part[at : at + stop - start]
        at += stop - start
