"""The two-stage all-reduce of payloads that cannot be summed: all-to-all, decode and sum, all-gather.

Each rank owns one part of the shard. It receives everybody's payload of that part, sums the decoded payloads in
float32, encodes the sum once more and sends it to all. With W ranks a rank sends 2 (W - 1) / W of one payload, as
the ring does, where gathering everybody's payload everywhere would send W - 1 of them. Owners decode their own
answer like everybody else, so that all ranks end with the same bits.
Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.compressors.base import Codec, Peers, Work
from gradwire.compressors.kernels.pieces import decode_each, encode_each

PART_ALIGN = 64
"""Parts start at multiples of this many elements, so that every payload is a whole number of 8-byte words."""


@runtime_checkable
class FusedCodec(Codec, Protocol):
    """A codec that also handles the residual, and the sum of several payloads, without a pass of its own."""

    def encode_residual(self, flat: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor) -> None:
        """Encodes p = flat + residual; writes p - decode(payload) to `left`, which may be `residual`."""

    def decode_reduce(self, payloads: Tensor, addend: Tensor | None, flat: Tensor) -> None:
        """Writes addend + decode(payloads[0]) + decode(payloads[1]) + ... into `flat`."""


@runtime_checkable
class PieceCodec(FusedCodec, Protocol):
    """A codec that does each stage of the exchange at once: one launch on CUDA, however many owners there are."""

    def encode_pieces(
        self, flat: Tensor, residual: Tensor | None, left: Tensor | None, payloads: Tensor, width: int
    ) -> None:
        """Encodes each run of `width` elements of flat + residual into its row of `payloads`; as encode_residual."""

    def decode_pieces(self, payloads: Tensor, flat: Tensor, width: int) -> None:
        """Decodes each row of `payloads` into its run of `width` elements of `flat`."""

    def serve(self, payloads: Tensor, residual: Tensor | None, left: Tensor | None, answer: Tensor, numel: int) -> None:
        """Encodes the sum of all payloads plus `residual` into `answer`, and what is left out into `left`."""


def encode(codec: Codec, flat: Tensor, residual: Tensor | None, left: Tensor | None, payload: Tensor) -> None:
    """Encodes flat + residual into `payload` and writes what the payload leaves out into `left`."""
    if isinstance(codec, FusedCodec):
        codec.encode_residual(flat, residual, left, payload)
        return
    p = flat if residual is None else flat + residual
    codec.encode(p, payload)
    if left is not None:
        decoded = torch.empty_like(p)
        codec.decode(payload, decoded)
        torch.sub(p, decoded, out=left)


def encode_pieces(
    codec: Codec, flat: Tensor, residual: Tensor | None, left: Tensor | None, payloads: Tensor, width: int
) -> None:
    """Encodes each run of `width` elements of flat + residual into its row of `payloads`."""
    if not flat.numel():
        return
    if isinstance(codec, PieceCodec):
        codec.encode_pieces(flat, residual, left, payloads, width)
    else:
        encode_each(partial(encode, codec), codec.wire_nbytes, flat, residual, left, payloads, width)


def decode_pieces(codec: Codec, payloads: Tensor, flat: Tensor, width: int) -> None:
    """Decodes each row of `payloads` into its run of `width` elements of `flat`."""
    if not flat.numel():
        return
    if isinstance(codec, PieceCodec):
        codec.decode_pieces(payloads, flat, width)
    else:
        decode_each(codec.decode, codec.wire_nbytes, payloads, flat, width)


def decode_sum(codec: Codec, payloads: Tensor, flat: Tensor) -> None:
    """Writes the sum of the decoded rows of `payloads` into `flat`, added in row order."""
    if isinstance(codec, FusedCodec):
        codec.decode_reduce(payloads, None, flat)
        return
    decoded = torch.empty_like(flat)
    flat.zero_()
    for payload in payloads:
        codec.decode(payload, decoded)
        flat.add_(decoded)


def serve(
    codec: Codec,
    back: Codec,
    payloads: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    answer: Tensor,
    numel: int,
) -> None:
    """The owner's stage: sums the decoded payloads, and encodes the sum plus its residual with `back`."""
    if back is codec and isinstance(codec, PieceCodec):
        codec.serve(payloads, residual, left, answer, numel)
        return
    total = torch.empty(numel, device=payloads.device)
    decode_sum(codec, payloads, total)
    encode(back, total, residual, left, answer)


@dataclass(frozen=True, slots=True)
class Parts:
    """How a shard of `numel` elements is shared out between `size` owners."""

    numel: int
    size: int

    @property
    def width(self) -> int:
        """Elements of a full part; the last ones may be shorter or empty."""
        return -(-self.numel // (self.size * PART_ALIGN)) * PART_ALIGN

    @property
    def full(self) -> int:
        """Parts of the full width."""
        return self.numel // self.width if self.numel else 0

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of the rank's part, and one past its last."""
        return min(self.numel, rank * self.width), min(self.numel, (rank + 1) * self.width)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Where two_stage finds and leaves what was left out; every tensor is 1-D float32, or None without residuals."""

    worker: Tensor | None = None
    """(numel) What this rank's payloads have left out so far."""
    worker_left: Tensor | None = None
    """(numel) Receives the new value."""
    server: Tensor | None = None
    """(own part) What this rank's answers have left out so far."""
    server_left: Tensor | None = None
    """(own part) Receives the new value."""


def _blank(codec: Codec, rows: int, nbytes: int, full: int, device: torch.device) -> Tensor:
    """Returns (rows, nbytes) uint8 for payloads, the first `full` of which fill their rows.

    What nobody may write is zero, so that no old memory travels: behind a shorter payload, and all over with a user's
    codec, which may leave bytes as they are.
    """
    payloads = torch.empty(rows, nbytes, dtype=torch.uint8, device=device)
    payloads[full if isinstance(codec, PieceCodec) else 0 :].zero_()
    return payloads


def two_stage(
    source: Tensor, target: Tensor, group: Peers, codec: Codec, back: Codec, residuals: Residuals
) -> Iterator[Work]:
    """Writes an approximation of the sum over the group of source + worker residual (+ server residual) to `target`.

    Args:
        source: 1-D float32, this rank's contribution.
        target: 1-D float32, the same bits on all ranks afterwards; may be `source`.
        group: The ranks to sum over.
        codec: Encodes what goes to the owners.
        back: Encodes the owners' sums.
        residuals: Read, and its `*_left` tensors written.

    Yields:
        Two works: all-to-all, all-gather.
    """
    parts = Parts(source.numel(), group.size)
    payloads = _blank(codec, group.size, codec.wire_nbytes(parts.width), parts.full, source.device)
    encode_pieces(codec, source, residuals.worker, residuals.worker_left, payloads, parts.width)
    received = torch.empty_like(payloads)
    yield group.all_to_all(received, payloads)

    start, stop = parts.bounds(group.rank)
    answer = _blank(back, 1, back.wire_nbytes(parts.width), int(stop - start == parts.width), source.device)[0]
    received = received[:, : codec.wire_nbytes(stop - start)]
    serve(
        codec,
        back,
        received,
        residuals.server,
        residuals.server_left,
        answer[: back.wire_nbytes(stop - start)],
        stop - start,
    )
    answers = torch.empty(group.size, answer.numel(), dtype=torch.uint8, device=source.device)
    yield group.all_gather(answers, answer)

    decode_pieces(back, answers, target, parts.width)


def two_stage_nbytes(numel: int, group_size: int, codec: Codec, back: Codec) -> int:
    """Bytes that one rank sends in `two_stage`: everybody else's parts there, its own answer to everybody back."""
    width = Parts(numel, group_size).width
    return (group_size - 1) * (codec.wire_nbytes(width) + back.wire_nbytes(width))
