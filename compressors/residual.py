"""Numbers that belong to gradient elements: residuals, momenta. Keyed by parameter name and slice, never by bucket.

A store keeps one flat tensor for each shard it has seen, so that a step costs no copy. When the shards change (bucket
rebuild, another fusion, a resumed run), the old tensors are taken apart into pieces by parameter, and new shards are
put together from the pieces.

Which rank has the residual of an element is not decided here. A rank keeps those of the shards that it compresses: the
plan's schedule gives each rank of a node a region of the node's sum (comms/plan/schedule.py), cut where `partition` of
the compressor says (as of `TwoStage`). The second residual, of the sum that an owner encodes again, is with the owner
of that part of the shard (`Parts` of two_stage.py). If regions move to other ranks, comms/migration.py moves residuals.

On CUDA, shards are worked on by several streams, and torch's allocator gives a freed block to the stream that allocated
it, at once. So whatever a store lets go of is first noted as in use on the current stream (`keep_until_read`). That is
enough: the streams of a step are behind the computing stream's work before it, and the computing stream is behind all
of them when the step has ended, so that everything older is ahead of the current stream, whichever it is.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compressors.base import Layout, Slice


@dataclass(slots=True)
class _Shard:
    """Stored values of one shard, and the buffer for those of the current step."""

    value: Tensor
    """Committed values, 1-D float32."""
    spare: Tensor | None = None
    """Buffer for staged values; None before the first step."""
    staged: bool = False
    """True if `spare` holds values that the next commit makes the stored ones."""
    filled: bool = False
    """True if `ElementStore.fill_zeros` has replaced its zeros."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one parameter's elements that no current shard holds."""

    name: str
    """Name of the parameter."""
    start: int
    """First element of the run within the flattened parameter."""
    value: Tensor
    """Values of the run, 1-D float32."""

    @property
    def stop(self) -> int:
        """One past the last element, within the parameter."""
        return self.start + self.value.numel()


def keep_until_read(*values: Tensor | None) -> None:
    """Keeps the memory of tensors from being reused before the current stream has finished the work queued on it.

    Called for tensors that are read for the last time or dropped, and may have been allocated on another stream.

    Args:
        values: The tensors; None and tensors that are not on CUDA are ignored.
    """
    for value in values:
        if value is not None and value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


class ElementStore:
    """Stores one float32 for each gradient element that this rank is responsible for; zero until something is stored.

    Thread safety: several threads may call it, as long as no two of them work on the same shard. `commit`, `drop`,
    `select` and `rescale` are for a time at which no other thread works on any.
    """

    def __init__(self) -> None:
        self._shards: dict[Layout, _Shard] = {}
        self._pieces: list[Piece] = []
        self._lock = threading.Lock()  # Guards _shards and _pieces.

    def read(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns the committed values for `layout`, 1-D float32; a view of the store, not to be changed."""
        with self._lock:
            return self._shard(layout, device).value

    def fill_zeros(self, layout: Layout, device: torch.device, default: float) -> Tensor:
        """Replaces every stored zero of `layout` by `default`, once; returns the values as `read` does."""
        value = self.read(layout, device)
        with self._lock:
            shard = self._shards[layout]
            if not shard.filled:
                value.masked_fill_(value == 0.0, default)
                shard.filled = True
        return value

    def stage(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns an uninitialised 1-D float32 buffer for the values that take effect at `commit`."""
        return self.update(layout, device)[1]

    def update(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns (committed values, buffer for new ones): the results of `read` and `stage`, with one look-up."""
        with self._lock:
            shard = self._shard(layout, device)
            if shard.spare is None:
                shard.spare = torch.empty_like(shard.value)
            shard.staged = True
            return shard.value, shard.spare

    def _shard(self, layout: Layout, device: torch.device) -> _Shard:
        """Returns the shard of a layout, made or moved to `device` if needed. Called under the lock."""
        shard = self._shards.get(layout)
        if shard is None:
            shard = self._shards[layout] = _Shard(self._assemble(layout, device))
        elif shard.value.device != device:
            keep_until_read(shard.value, shard.spare)
            shard.value, shard.spare = shard.value.to(device), None
        return shard

    def peek(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns a copy of the values of `layout`, (layout.numel) float32, zero if none is stored. Moves nothing."""
        flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        wanted = _by_name(layout)
        for piece in self.pieces():
            _fill(flat, piece, wanted.get(piece.name, []))
        return flat

    def pour(self, flat: Tensor, layout: Layout) -> None:
        """Adds the stored values of a layout's elements to `flat`, in place, and stages zeros instead of them."""
        if self.holds(layout):
            held, staged = self.update(layout, flat.device)
            flat.add_(held)
            staged.zero_()

    def commit(self) -> None:
        """Makes what was staged since the last commit or drop the stored values."""
        for shard in self._shards.values():
            if shard.staged and shard.spare is not None:
                shard.value, shard.spare, shard.staged = shard.spare, shard.value, False

    def select(self, finite: Tensor) -> None:
        """Commits the staged values if `finite` is True, and drops them if it is False; the host does not read it.

        The stored values are changed in place, on the device.

        Args:
            finite: 0-dim bool tensor.
        """
        flags: dict[torch.device, Tensor] = {finite.device: finite}
        for shard in self._shards.values():
            if shard.staged and shard.spare is not None:
                device = shard.value.device
                flag = flags.get(device)
                if flag is None:
                    flag = flags[device] = finite.to(device)
                torch.where(flag, shard.spare, shard.value, out=shard.value)
                shard.staged = False

    def drop(self) -> None:
        """Discards what was staged: the stored values stay as they are."""
        for shard in self._shards.values():
            shard.staged = False

    def pass_over(self, names: Collection[str]) -> None:
        """Overwrites the staged values of these parameters by the stored ones: a commit does not change them."""
        for layout, shard in self._shards.items():
            if shard.staged and shard.spare is not None:
                for item in layout.slices:
                    if item.name in names:
                        shard.spare[item.start : item.stop] = shard.value[item.start : item.stop]

    def has(self, layout: Layout) -> bool:
        """Returns whether `layout` is one of the shards: then reading it takes no other shard apart."""
        return layout in self._shards

    def holds(self, layout: Layout) -> bool:
        """Returns whether a value is stored for any element of `layout`."""
        if layout in self._shards:
            return True
        with self._lock:
            known = list(self._shards)
            pieces = list(self._pieces)
        wanted = _by_name(layout)
        return any(_overlap(other, wanted) for other in known) or any(
            _meets(piece.start, piece.stop, wanted.get(piece.name, ())) for piece in pieces
        )

    def covers(self, layout: Layout, part: Layout) -> bool:
        """Returns whether all stored values of the elements of `layout` are of elements of `part`."""
        wanted, within = _by_name(layout), _by_name(part)
        return all(
            any(
                item.parameter_start <= start and start + numel <= item.parameter_start + item.numel
                for item in within.get(name, ())
            )
            for name, start, numel in self.runs()
            if _meets(start, start + numel, wanted.get(name, ()))
        )

    def export(self, layout: Layout, device: torch.device) -> Tensor:
        """Removes and returns the values for `layout`, (layout.numel) float32, zero for elements without one."""
        with self._lock:
            shard = self._shards.pop(layout, None)
            if shard is None:
                return self._assemble(layout, device)
            keep_until_read(shard.value, shard.spare)
            return shard.value.to(device)

    def adopt(self, layout: Layout, flat: Tensor) -> None:
        """Adds `flat` (1-D float32, layout.numel) to the stored values of `layout`; keeps a copy, not `flat`."""
        with self._lock:
            shard = self._shards.pop(layout, None)
            if shard is None:
                value = self._assemble(layout, flat.device).add_(flat)
            else:
                keep_until_read(shard.value, shard.spare)
                value = shard.value.to(flat.device) + flat
            self._shards[layout] = _Shard(value)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiplies every stored value by `factor`, in place.

        Args:
            factor: A number, or a 0-dim floating-point tensor; stored values move to the device of the tensor.
        """
        if isinstance(factor, Tensor):
            for shard in self._shards.values():
                if shard.value.device != factor.device:
                    keep_until_read(shard.value, shard.spare)
                    shard.value, shard.spare = shard.value.to(factor.device, non_blocking=True), None
            keep_until_read(*(piece.value for piece in self._pieces if piece.value.device != factor.device))
            self._pieces = [
                piece
                if piece.value.device == factor.device
                else Piece(piece.name, piece.start, piece.value.to(factor.device, non_blocking=True))
                for piece in self._pieces
            ]
            factor = factor.to(torch.float32)
        values = [shard.value for shard in self._shards.values()] + [piece.value for piece in self._pieces]
        if values:
            torch._foreach_mul_(values, factor)

    def pieces(self) -> Iterator[Piece]:
        """Yields every stored run, as views, in a fixed order: by name, then by start."""
        with self._lock:
            everything = list(self._everything())
        yield from sorted(everything, key=lambda piece: (piece.name, piece.start))

    def runs(self) -> Iterator[tuple[str, int, int]]:
        """Yields name, start and numel of every stored run, in no order, without touching what is stored."""
        with self._lock:
            runs = [(item.name, item.parameter_start, item.numel) for layout in self._shards for item in layout.slices]
            runs += [(piece.name, piece.start, piece.value.numel()) for piece in self._pieces]
        yield from runs

    def replace(self, pieces: list[Piece]) -> None:
        """Replaces everything that is stored by `pieces`."""
        with self._lock:
            for shard in self._shards.values():
                keep_until_read(shard.value, shard.spare)
            keep_until_read(*(piece.value for piece in self._pieces))
            self._shards.clear()
            self._pieces = list(pieces)

    def _everything(self) -> Iterator[Piece]:
        """Yields every stored run, as views. Called under the lock."""
        for layout, shard in self._shards.items():
            for item in layout.slices:
                yield Piece(item.name, item.parameter_start, shard.value[item.start : item.stop])
        yield from self._pieces

    def _assemble(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns the values for `layout`, 1-D float32, and removes them from the store. Called under the lock.

        Every shard that overlaps `layout` is divided into pieces; those outside of it stay in the store.
        """
        wanted = _by_name(layout)
        for old in [old for old in self._shards if _overlap(old, wanted)]:
            shard = self._shards.pop(old)
            keep_until_read(shard.spare)
            value = shard.value
            self._pieces += [
                Piece(item.name, item.parameter_start, value[item.start : item.stop]) for item in old.slices
            ]
        flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        rest: list[Piece] = []
        for piece in self._pieces:
            rest += _fill(flat, piece, wanted.get(piece.name, []))
        self._pieces = rest
        return flat


def _by_name(layout: Layout) -> dict[str, list[Slice]]:
    """Returns name of a parameter -> its slices in a layout."""
    found: dict[str, list[Slice]] = {}
    for item in layout.slices:
        found.setdefault(item.name, []).append(item)
    return found


def _meets(start: int, stop: int, slices: Sequence[Slice]) -> bool:
    """Returns whether the run of a parameter from `start` to `stop` shares an element with one of its slices."""
    return any(start < item.parameter_start + item.numel and item.parameter_start < stop for item in slices)


def _fill(flat: Tensor, piece: Piece, wanted: list[Slice]) -> list[Piece]:
    """Copies the elements that a piece shares with slices of a flat tensor into it.

    Args:
        flat: 1-D float32, changed in place.
        piece: Stored run of a parameter.
        wanted: Slices of the same parameter in `flat`.

    Returns:
        The parts of the piece that are in no slice.
    """
    rest = [piece]
    for item in wanted:
        still = []
        for part in rest:
            first = max(part.start, item.parameter_start)
            last = min(part.stop, item.parameter_start + item.numel)
            if first >= last:
                still.append(part)
                continue
            at = item.start + first - item.parameter_start
            keep_until_read(part.value)
            flat[at : at + last - first] = part.value[first - part.start : last - part.start]
            if part.start < first:
                still.append(Piece(part.name, part.start, part.value[: first - part.start]))
            if last < part.stop:
                still.append(Piece(part.name, last, part.value[last - part.start :]))
        rest = still
    return rest


def _overlap(old: Layout, wanted: dict[str, list[Slice]]) -> bool:
    """Returns whether a layout shares an element with slices, which are given by the names of their parameters."""
    return any(
        _meets(item.parameter_start, item.parameter_start + item.numel, wanted.get(item.name, ()))
        for item in old.slices
    )
