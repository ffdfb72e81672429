"""A row of a parameter group (what one rank owns of it) as bytes: matrices encoded in few bits, the rest as it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comms.sharded.layout import RowRuns
from gradwire.compressors.codecs.base import FusedCodec

ALIGN_NBYTES = 16
"""Payloads, and the parts of one, start at multiples of this: any dtype may be viewed there, and kernels read wide."""


def payload_nbytes(codec: FusedCodec, runs: RowRuns, dtype: torch.dtype) -> int:
    """Bytes of a row's payload.

    Args:
        codec: Of what is compressed.
        runs: Of the row.
        dtype: Of what is not.
    """
    return _dense_at(codec, runs) + _aligned(runs.dense_numel * dtype.itemsize)


def encode_row(
    codec: FusedCodec,
    runs: RowRuns,
    row: Tensor,
    payload: Tensor,
    *,
    residual: Tensor | None = None,
    sent: Tensor | None = None,
) -> None:
    """Encodes a row.

    Args:
        codec: For what is compressed.
        runs: Of the row.
        row: (runs.numel), floating; read.
        payload: (payload_nbytes) uint8, at a multiple of 16 bytes; overwritten.
        residual: (runs.compressed_numel) float32, added to the row before it is encoded; overwritten with the
            compression error.
        sent: (runs.numel) float32, what the receivers have: of what is compressed, the difference is encoded.
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
    payload[used:start].zero_()  # no old memory is sent
    payload[start + dense_nbytes :].zero_()


def decode_rows(codec: FusedCodec, runs: RowRuns, payloads: Tensor, dtype: torch.dtype, own: Tensor | None) -> Tensor:
    """The sum of several ranks' payloads of one row.

    Args:
        codec: That encoded what is compressed.
        runs: Of the row.
        payloads: (ranks, payload_nbytes) uint8, contiguous.
        dtype: Of the rows that were encoded.
        own: (runs.numel), this rank's contribution, which was not encoded; or None.

    Returns:
        (runs.numel) float32.
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


def add_payload(codec: FusedCodec, runs: RowRuns, payload: Tensor, dtype: torch.dtype, sent: Tensor) -> None:
    """Brings what the receivers have of a row up to date.

    Args:
        codec: That encoded what is compressed.
        runs: Of the row.
        payload: (payload_nbytes) uint8, of differences where it is compressed.
        dtype: Of the row that was encoded.
        sent: (runs.numel) float32, changed in place: the same bits on all ranks that have had the same payloads.
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


def _dense_at(codec: FusedCodec, runs: RowRuns) -> int:
    return _aligned(codec.wire_nbytes(runs.compressed_numel)) if runs.compressed_numel else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def gather_runs(row: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """The elements of these runs (start, stop) one after the other; a view where there is one run, or none."""
    if not runs:
        return row[:0]
    if len(runs) == 1:
        return row[runs[0][0] : runs[0][1]]
    return torch.cat([row[start:stop] for start, stop in runs])


def scatter_runs(part: Tensor, row: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """Writes elements that lie one after the other to these runs of `row`."""
    at = 0
    for start, stop in runs:
        row[start:stop] = part[at : at + stop - start]
        at += stop - start
