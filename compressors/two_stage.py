"""The two-stage all-reduce of payloads that cannot be summed, and the compressor that it makes of any codec.

All-to-all, decode and sum, all-gather: each rank owns one part of the shard. It receives all ranks' payloads of that
part, sums the decoded payloads in float32, encodes the sum once more and sends it to all. With W ranks a rank sends
2 (W - 1) / W of one payload, as the ring does; gathering all payloads on all ranks would send W - 1 of them.
Owners decode their own reduced payload as all other ranks do, so that all ranks end with the same bits.
Source: Tang et al., 1-bit Adam, ICML 2021, section 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.compressors.base import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    Codec,
    Collective,
    Layout,
    Member,
    Request,
    check_gradient,
    equal_bounds,
    refuse_capture,
    weighted_bounds,
)
from gradwire.compressors.codecs.base import BlockCodec, PieceCodec, in_pieces
from gradwire.compressors.kernels.dispatch import prepare_kernels
from gradwire.compressors.stateful import Stateful

PART_ALIGN = 64
"""Parts start at multiples of this many elements, so that every payload is a whole number of 8-byte words."""

SHARD_ALIGN = 1024
"""Shards are cut at multiples of the largest block of any codec here, so that few blocks are cut short."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Division of a shard of `numel` elements into pieces, of which each of `size` owners owns a run.

    With equal parts each owner has one piece. With `shares` there are sum(shares) pieces or fewer, independent of their
    owners: so neither a payload nor a sum depends on which rank owns which piece.
    """

    numel: int
    size: int
    shares: tuple[int, ...] = ()
    width: int = field(init=False)
    """Number of elements of a full piece; the last pieces may be shorter or empty."""
    pieces: int = field(init=False)
    """Number of pieces."""
    full: int = field(init=False)
    """Number of pieces with `width` elements."""
    owned: tuple[int, ...] = field(init=False)
    """Bounds of the pieces of each owner, `size + 1` ascending numbers; empty if each owner has one piece."""

    def __post_init__(self) -> None:
        """Computes the derived fields."""
        parts, align = (sum(self.shares), SHARD_ALIGN) if self.shares else (self.size, PART_ALIGN)
        width = -(-self.numel // (parts * align)) * align
        if self.shares:
            width = max(align, width)
        pieces = max(1, -(-self.numel // width)) if self.shares else self.size
        derived = {"width": width, "pieces": pieces, "full": self.numel // width if self.numel else 0}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "owned", weighted_bounds(pieces, self.shares) if self.shares else ())

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns the first element of the rank's part, and one past its last."""
        first, last = (rank, rank + 1) if not self.shares else self.owned[rank : rank + 2]
        return min(self.numel, first * self.width), min(self.numel, last * self.width)


parts_of = lru_cache(maxsize=1024)(Parts)
"""Returns `Parts` of these arguments; cached, because every step has the same shards."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals of one exchange; every tensor is 1-D float32, or None without residuals."""

    worker: Tensor | None = None
    """(numel) Compression error of this rank's payloads so far."""
    new_worker: Tensor | None = None
    """(numel) Overwritten with the compression error after this exchange."""
    server: Tensor | None = None
    """(own part) Compression error of this rank's reduced payloads so far."""
    new_server: Tensor | None = None
    """(own part) Overwritten with the compression error of the reduced payload."""


def _blank(rows: int, nbytes: int, full: int, device: torch.device) -> Tensor:
    """Returns memory for payloads, (rows, nbytes) uint8.

    Bytes behind a shorter payload stay unwritten; they are zero, so that no old memory is sent.

    Args:
        rows: Number of payloads.
        nbytes: Bytes of the longest payload.
        full: Number of payloads at the beginning that fill their rows: these rows are not cleared.
        device: Device of the memory.
    """
    payloads = torch.empty(rows, nbytes, dtype=torch.uint8, device=device)
    if full < rows:
        payloads[full:].zero_()
    return payloads


def two_stage(
    source: Tensor, target: Tensor, group: Member, codec: PieceCodec, return_codec: PieceCodec, residuals: Residuals
) -> Iterator[Collective]:
    """Writes an approximation of the sum over the group of source + worker residual (+ server residual) to `target`.

    Args:
        source: 1-D float32, this rank's contribution.
        target: 1-D float32, the same bits on all ranks afterwards; may be `source`.
        group: The ranks to sum over.
        codec: Encodes the payloads for the owners.
        return_codec: Encodes the owners' sums; may be `codec`.
        residuals: Compression errors of earlier exchanges; its `new_*` tensors are overwritten.

    Yields:
        Two collectives: all-to-all, all-gather.
    """
    # Encode each owner's pieces, and send them to it.
    parts = parts_of(source.numel(), group.size, group.shares)
    there_nbytes = back_nbytes = codec.wire_nbytes(parts.width)
    if return_codec is not codec:
        back_nbytes = return_codec.wire_nbytes(parts.width)
    payloads = _blank(parts.pieces, there_nbytes, parts.full, source.device)
    codec.encode_pieces(source, residuals.worker, residuals.new_worker, payloads, parts.width)
    start, stop = parts.bounds(group.rank)
    own = parts.owned[group.rank + 1] - parts.owned[group.rank] if group.shares else 1
    received = torch.empty(group.size * own, payloads.shape[1], dtype=torch.uint8, device=source.device)
    yield Collective(ALL_TO_ALL, (received, payloads), parts.owned)

    # As an owner: sum each own piece over the ranks, encode the sums, and send them to all.
    full = (stop - start) // max(parts.width, 1)
    reduced = _blank(own, back_nbytes, full, source.device)
    for piece in range(own):
        low = piece * parts.width
        numel = min(stop - start - low, parts.width)
        if numel < parts.width:
            there_nbytes, back_nbytes = codec.wire_nbytes(numel), return_codec.wire_nbytes(numel)
        old, new = residuals.server, residuals.new_server
        if own > 1:
            old, new = (None if each is None else each[low : low + numel] for each in (old, new))
        rows, row = received[piece::own, :there_nbytes], reduced[piece, :back_nbytes]
        if return_codec is codec:
            codec.reduce_encode(rows, old, new, row, numel)
        else:
            total = torch.empty(numel, dtype=torch.float32, device=source.device)
            codec.decode_reduce(rows, None, total)
            return_codec.encode_residual(total, old, new, row)
    all_reduced = torch.empty(parts.pieces, reduced.shape[1], dtype=torch.uint8, device=source.device)
    yield Collective(ALL_GATHER, (all_reduced, reduced), parts.owned)

    # Decode all sums, the own ones too, so that all ranks have the same bits.
    return_codec.decode_pieces(all_reduced, target, parts.width)


def two_stage_nbytes(numel: int, group_size: int, codec: Codec, return_codec: Codec) -> int:
    """Returns the bytes that one rank sends in `two_stage` with equal parts.

    Args:
        numel: Elements of the shard.
        group_size: Number of ranks.
        codec: Encodes the payloads for the owners, one for each other rank.
        return_codec: Encodes the owner's sum, which is sent to each other rank.
    """
    width = Parts(numel, group_size).width
    return (group_size - 1) * (codec.wire_nbytes(width) + return_codec.wire_nbytes(width))


class TwoStage(Stateful):
    """Makes a compressor of any codec, a user's own too: the two-stage exchange, with residuals and a momentum.

    Args:
        name: Name by which the user chooses it, `compressor=`.
        codec: Encodes the payloads for the owners of the parts.
        return_codec: Encodes the owners' sums; None takes `codec`.
        residual: Whether the compression error of a payload is added to the next step's gradient (error feedback). A
            payload is a shard of the node's sum, so its error belongs to the node and not to this rank's gradient.
        momentum: Factor of a momentum that is applied before the compression: u = momentum * u + gradient is sent. The
            optimizer then runs without momentum. 0 applies none.
        warmup_steps: Steps at the start whose gradients are sent dense.

    Raises:
        ValueError: `momentum` or `warmup_steps` is out of range.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 2 (residual).
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        return_codec: Codec | None = None,
        residual: bool = True,
        momentum: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"`momentum` is {momentum}; wanted 0 <= momentum < 1")
        if warmup_steps < 0:
            raise ValueError(f"`warmup_steps` is {warmup_steps}; wanted 0 or more")
        super().__init__(name, [*(["residual", "server"] if residual else []), *(["momentum"] if momentum else [])])
        self.codec = in_pieces(codec)
        self.return_codec = self.codec if return_codec is None or return_codec is codec else in_pieces(return_codec)
        self.residual = residual
        self.momentum = momentum
        self.warmup_steps = warmup_steps
        self._own_parts: dict[tuple[Layout, Member], Layout] = {}

    two_stage = True
    stochastic = False
    """True if payloads are rounded by random numbers: each payload then has a codec of its own, see `random_codec`."""

    @property
    def has_owners(self) -> bool:
        """True: each rank owns a part of a shard, sums the payloads of that part, and sends the sum to all ranks."""
        return True

    def partition(self, layout: Layout, parts: int) -> tuple[int, ...]:
        """Cuts a bucket into `parts` shards of one length, a multiple of 1024 elements; the last takes the remainder.

        With fewer than `1024 * parts` elements that length is 0: the last shard has the whole bucket and all others are
        empty.

        Args:
            layout: Parameters of the bucket; only its number of elements counts.
            parts: Number of shards.

        Returns:
            `parts + 1` ascending offsets from 0 to `layout.numel`.
        """
        return equal_bounds(layout.numel, parts, SHARD_ALIGN)

    def wire_nbytes(self, layout: Layout, group_size: int) -> int:
        """Returns the bytes that one rank sends for a shard in the two-stage exchange with equal parts."""
        return two_stage_nbytes(layout.numel, group_size, self.codec, self.return_codec)

    def all_reduce(self, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """Replaces `shard` by its approximate sum, in the two-stage exchange; exactly during the dense start."""
        if shard.is_cuda:
            refuse_capture(self.name)
        if (layout, group) not in self._own_parts:
            check_gradient(shard)
            self.prepare(shard.device)
            self._own_parts[layout, group] = layout.cut(
                *Parts(layout.numel, group.size, group.shares).bounds(group.rank)
            )
        source = self._with_momentum(shard, layout) if self.momentum else shard
        if group.size == 1 or self.step < self.warmup_steps or not shard.numel():
            yield from self._dense(source, shard, layout, group)
            return
        codec = self.codec_for(layout, group.rank)
        scales = self.scales_of(layout, shard.device)
        if scales is not None:
            source = torch.div(source, scales, out=shard)
        residuals = self._residuals(layout, group, shard.device)
        # The owners' sums are encoded by the return codec; without one of its own, by the codec of this payload.
        return_codec = codec if self.return_codec is self.codec else self.return_codec
        yield from two_stage(source, shard, group, codec, return_codec, residuals)
        if scales is not None:
            shard.mul_(scales)

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the codecs' kernels for a device; called in the first step as well, if not before."""
        families = {codec.family for codec in (self.codec, self.return_codec) if isinstance(codec, BlockCodec)}
        if families:
            prepare_kernels(device, families)

    def codec_for(self, layout: Layout, rank: int) -> PieceCodec:
        """Returns the codec for this step's payload of a shard.

        Args:
            layout: Layout of the shard.
            rank: Index of this rank in the group.
        """
        return self.random_codec(layout, rank) if self.stochastic else self.codec

    def random_codec(self, layout: Layout, rank: int) -> PieceCodec:
        """Returns the codec of one payload that is rounded at random; subclasses that are `stochastic` override this.

        Args:
            layout: Layout of the shard.
            rank: Index of this rank in the group.
        """
        raise NotImplementedError(f"{type(self).__name__} is `stochastic`; wanted a `random_codec` of its own")

    def scales_of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Returns the scale by which each element is divided before it is encoded, (layout.numel) float32.

        Residuals are kept divided by it as well. None divides by nothing. Compressors that know the usual magnitude of
        each element override this; all ranks of a group must return the same bits.
        """
        return None

    def observe(self, total: Tensor, layout: Layout) -> None:
        """Called with the sum of each dense step at the start; does nothing here.

        Args:
            total: 1-D float32 sum over the group, the same bits on all ranks.
            layout: Layout of the sum.
        """

    def flush(self, shard: Tensor, layout: Layout) -> None:
        """Adds this rank's residuals to `shard`, in place, before a dense all-reduce.

        They are the compression errors of its payloads (worker) and of the sums of the part that it owns (server). They
        are set to zero when the step commits; the momentum stays.

        Args:
            shard: 1-D float32, changed in place.
            layout: Places of the parameters in `shard`.
        """
        if not self.residual:
            return
        self._fold_server(layout, shard.device)
        if self.fields["residual"].holds(layout):
            residual, scales = self.fields["residual"].read(layout, shard.device), self.scales_of(layout, shard.device)
            shard.add_(residual if scales is None else residual * scales)
            self.fields["residual"].stage(layout, shard.device).zero_()

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns the state, see `Compressor.export`; the row of the server residual is zero.

        What it held has been added to the worker residual.
        """
        if self.residual:
            self._fold_server(layout, device)
        return super().export(layout, device)

    def _with_momentum(self, shard: Tensor, layout: Layout) -> Tensor:
        """Returns the new momentum, momentum * u + gradient, which replaces u when the step commits.

        Args:
            shard: 1-D float32, the gradient; not changed.
            layout: Places of the parameters in `shard`.
        """
        old, new = self.fields["momentum"].update(layout, shard.device)
        return torch.add(shard, old, alpha=self.momentum, out=new)

    def _dense(self, source: Tensor, shard: Tensor, layout: Layout, group: Member) -> Iterator[Request]:
        """Replaces `shard` by the exact sum over the group of `source` plus the residuals, which become zero.

        Args:
            source: 1-D float32, this rank's contribution: `shard` itself, or the momentum.
            shard: 1-D float32, overwritten.
            layout: Places of the parameters in `shard`.
            group: The ranks to sum over.
        """
        if source is not shard:
            shard.copy_(source)
        self.flush(shard, layout)
        if group.size > 1:
            yield Collective(ALL_REDUCE, (shard,))
            if self.step < self.warmup_steps:
                self.observe(shard, layout)

    def _residuals(self, layout: Layout, group: Member, device: torch.device) -> Residuals:
        """Returns the residuals of a shard and the buffers for the new ones; all None without error feedback.

        A server residual of other parts, owned before the parts changed, is first added to the worker residual.
        """
        if not self.residual:
            return Residuals()
        part = self._own_parts[layout, group]
        worker, server = self.fields["residual"], self.fields["server"]
        if not server.has(part) and not server.covers(layout, part):
            self._fold_server(layout, device)
        return Residuals(*worker.update(layout, device), *server.update(part, device))

    def _fold_server(self, layout: Layout, device: torch.device) -> None:
        """Moves this rank's server residual into its worker residual, which has the same effect on the next sum."""
        if self.fields["server"].holds(layout):
            self.fields["residual"].adopt(layout, self.fields["server"].export(layout, device))
