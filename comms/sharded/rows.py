"""A row of a unit (what one rank owns of it) as bytes: matrices encoded in few bits, the rest as it is."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradwire.comms.sharded.layout import RowRuns

ALIGN_NBYTES = 16
"""Payloads, and the parts of one, start at multiples of this: any dtype may be viewed there, and kernels read wide."""


class RowCodec(Protocol):
    """What a row needs of a codec; see `compressors.base.Codec` and `compressors.codecs.base.FusedCodec`."""

    def wire_nbytes(self, numel: int) -> int:
        """Bytes of the payload of so many elements."""

    def encode(self, flat: Tensor, payload: Tensor) -> None:
        """1-D float32 -> 1-D uint8, overwritten."""

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes addend + decode(payloads[0]) + ... into `flat`."""


def payload_nbytes(codec: RowCodec, runs: RowRuns, dtype: torch.dtype) -> int:
    """Bytes of a row's payload.

    Args:
        codec: Of what is compressed.
        runs: Of the row.
        dtype: Of what is not.
    """
    return _dense_at(codec, runs) + _aligned(runs.dense_numel * dtype.itemsize)


def encode_row(codec: RowCodec, runs: RowRuns, row: Tensor, payload: Tensor) -> None:
    """Encodes a row.

    Args:
        codec: For what is compressed.
        runs: Of the row.
        row: (runs.numel), floating; read.
        payload: (payload_nbytes) uint8, at a multiple of 16 bytes; overwritten.
    """
    used = codec.wire_nbytes(runs.compressed_numel)
    if runs.compressed_numel:
        codec.encode(_gather(row, runs.compressed).float(), payload[:used])
    start = _dense_at(codec, runs)
    dense_nbytes = runs.dense_numel * row.element_size()
    if dense_nbytes:
        payload[start : start + dense_nbytes].view(row.dtype).copy_(_gather(row, runs.dense))
    payload[used:start].zero_()  # no old memory is sent
    payload[start + dense_nbytes :].zero_()


def decode_rows(codec: RowCodec, runs: RowRuns, payloads: Tensor, dtype: torch.dtype, own: Tensor | None) -> Tensor:
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
        addend = None if own is None else _gather(own, runs.compressed).float()
        codec.decode_reduce(payloads[:, : codec.wire_nbytes(runs.compressed_numel)], addend, compressed)
        _scatter(compressed, total, runs.compressed)
    if runs.dense_numel:
        start = _dense_at(codec, runs)
        rows = payloads[:, start : start + runs.dense_numel * dtype.itemsize].view(dtype)
        dense = rows.sum(0, dtype=torch.float32)
        if own is not None:
            dense.add_(_gather(own, runs.dense))
        _scatter(dense, total, runs.dense)
    return total


def _dense_at(codec: RowCodec, runs: RowRuns) -> int:
    return _aligned(codec.wire_nbytes(runs.compressed_numel)) if runs.compressed_numel else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def _gather(row: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    if len(runs) == 1:
        return row[runs[0][0] : runs[0][1]]
    return torch.cat([row[start:stop] for start, stop in runs])


def _scatter(part: Tensor, row: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    at = 0
    for start, stop in runs:
        row[start:stop] = part[at : at + stop - start]
        at += stop - start
