"""Per-element scales: the magnitude that each gradient element is divided by before only its sign is sent.

One bit cannot say how large an element is, and the elements of a layer differ by orders of magnitude: the weight behind
a pixel that is mostly black moves far less than its neighbour. With one magnitude for a whole block, small elements get
noise of many times their size and large ones wait in the residual. During the dense start (`warmup_steps`) every rank
receives the same averages, so all ranks know the usual magnitude of each element without sending a byte for it.

Source: the scaling of layers to one magnitude before the compression and back afterwards in Li et al., 1-bit LAMB, HiPC
2022 (arXiv 2104.06069), here element by element; what the dense start has shown is frozen as the variance is in Tang et
al., 1-bit Adam, ICML 2021, section 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.compressors.base import Layout
from gradwire.compressors.residual import ElementStore, Piece, keep_until_read

FLOOR = 0.125
"""Fraction of a parameter's mean magnitude that is added to the scale of each of its elements, so that an element that
the dense start hardly moved can still grow. Measured: 0.02 to 0.5 give equal accuracy on the CNN of
docs/results/convergence.md; a floor of 1 after a short start does not."""

EXPONENT = 0x7F800000
"""Mask of the exponent bits of a float32. Keeping the exponent only makes a scale a power of two, so dividing and
multiplying by it is exact and a residual comes back bit for bit. Rounding all scales down does not change the signs of
a block."""

DOUBLE_BIAS = 1023
"""Exponent bias of a float64 (IEEE 754)."""

SMALLEST, LARGEST = 2.0**-60, 2.0**60
"""Limits of a scale: dividing by it makes no gradient of a converging training infinite or denormal."""


class ElementScale(ElementStore):
    """Store of per-element scales: sums of magnitudes until `freeze`, then powers of two around 1 in each shard.

    Invariant: all ranks of a group have the same bits. Sums and products of two floats are rounded identically by every
    processor, and means are sums in a fixed order (`fixed_order_sum`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[Layout, tuple[Tensor, Tensor]] = {}
        """Shard -> (scales made by a revocable `freeze`, the sums that they were made of); emptied by `confirm`."""
        self._summed_pieces: tuple[list[Piece], list[Piece]] | None = None
        """(scales, sums) of a revocable `freeze` for elements that are in no shard; None without one."""

    def observe(self, layout: Layout, total: Tensor) -> None:
        """Stages the sums plus the magnitudes of one more dense step; does nothing if the shard's scales are in use.

        Args:
            layout: Layout of the shard.
            total: 1-D float32 sum of the step, the same bits on all ranks of the group.
        """
        sums = self.read(layout, total.device)
        if not self._shards[layout].filled:
            torch.add(sums, total.abs(), out=self.stage(layout, total.device))

    def freeze(self, revocable: bool = False) -> None:
        """Turns the committed sums into scales, in shards that have no scales yet; does not wait for the device.

        Args:
            revocable: Whether to keep the sums until `confirm` or `revoke`; the scales then use the memory of the
                staged sums.
        """
        for layout, shard in self._shards.items():
            if shard.filled:
                continue
            sums, spare, shard.spare = shard.value, shard.spare, None
            if revocable:
                shard.value = torch.empty_like(sums) if spare is None else spare
                self._sums[layout] = shard.value, sums
            else:
                keep_until_read(spare)
            _write_scales(sums, [(item.start, item.stop) for item in layout.slices], shard.value)
        pieces = [
            Piece(piece.name, piece.start, torch.empty_like(piece.value) if revocable else piece.value)
            for piece in self._pieces
        ]
        for piece, scales in zip(self._pieces, pieces, strict=True):
            _write_scales(piece.value, [(0, piece.value.numel())], scales.value)
        if revocable:
            self._summed_pieces = pieces, self._pieces
        self._pieces = pieces

    def confirm(self) -> None:
        """Drops the sums that a revocable `freeze` has kept."""
        keep_until_read(*(sums for _, sums in self._sums.values()))
        if self._summed_pieces is not None:
            keep_until_read(*(piece.value for piece in self._summed_pieces[1]))
        self._sums.clear()
        self._summed_pieces = None

    def revoke(self) -> None:
        """Restores the sums that a revocable `freeze` has kept, except in shards whose scales were used or moved."""
        for layout, (scales, sums) in self._sums.items():
            shard = self._shards.get(layout)
            if shard is not None and shard.value is scales and not shard.filled:
                keep_until_read(scales)
                shard.value = sums
        if self._summed_pieces is not None and self._summed_pieces[0] is self._pieces:
            keep_until_read(*(piece.value for piece in self._pieces))
            self._pieces = self._summed_pieces[1]
        self.confirm()

    def scales(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns the scales of `layout`, (layout.numel) float32, a read-only view; 1 if there were no gradients."""
        return self.fill_zeros(layout, device, 1.0)

    def rescale(self, factor: float | Tensor) -> None:
        """No-op: scales are relative to their shard, and the magnitude in each payload block follows the loss scale."""


def _write_scales(sums: Tensor, runs: Sequence[tuple[int, int]], scales: Tensor) -> None:
    """Writes the scales of one shard, powers of two in the unit of the power of two above the mean of all sums.

    A scale is the sum in that unit, plus `FLOOR` times the mean of its own parameter, rounded down to a power of two.

    Args:
        sums: 1-D float32 sums of magnitudes.
        runs: Start and stop of each parameter's elements in it, ascending and without gaps.
        scales: Shape and dtype of `sums`, overwritten; may be `sums` itself.
    """
    if not sums.numel():
        return
    totals = [fixed_order_sum(sums[start:stop]) for start, stop in runs]
    # Counts stay Python numbers: as a tensor, copying them to the device would block the host.
    mean = [fixed_order_sum(torch.stack(totals)) / sums.numel()]
    means = torch.stack(mean + [total / (stop - start) for total, (start, stop) in zip(totals, runs, strict=True)])
    above = _power_of_two_above(means)
    whole = torch.where(means[0] > 0.0, above[0], 1.0)
    floors = torch.where(means[1:] > 0.0, FLOOR * above[1:] / whole, 1.0)  # zeros end as 1
    torch.div(sums, whole, out=scales)
    for (start, stop), floor in zip(runs, floors, strict=True):
        scales[start:stop].add_(floor)
    power_of_two_(scales)


def fixed_order_sum(values: Tensor) -> Tensor:
    """Returns the sum in float64, 0-dim, with the same bits on every processor.

    The second half is added to the first until one number is left. `Tensor.sum` and `mean` add in an order that depends
    on the instruction set and the number of threads: then a mean close to a power of two could give ranks different
    scales.

    Args:
        values: 1-D floating-point.
    """
    total = values.to(torch.float64, copy=True)
    while total.numel() > 1:
        half = (total.numel() + 1) // 2
        total[: total.numel() - half] += total[half:]
        total = total[:half]
    return total.sum()


def _power_of_two_above(means: Tensor) -> Tensor:
    """Returns the next powers of two above float64 numbers >= 0, at least 2^-100; 1 for numbers that are not finite."""
    exponents = (means.view(torch.int64) >> 52) + 1
    above = exponents.clamp_(DOUBLE_BIAS - 100, DOUBLE_BIAS + 1023).bitwise_left_shift_(52).view(torch.float64)
    return torch.where(means.isfinite(), above, 1.0)


def power_of_two_(scales: Tensor) -> Tensor:
    """Rounds positive float32 numbers down to powers of two from `SMALLEST` to `LARGEST`, in place; returns them."""
    scales.clamp_(SMALLEST, LARGEST).view(torch.int32).bitwise_and_(EXPONENT)
    return scales
