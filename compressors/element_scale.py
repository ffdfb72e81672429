"""The unit that each element of a gradient is measured in before only its sign is sent.

One bit cannot say how large an element is, and the elements of a layer differ by orders of magnitude: the weight behind
a pixel that is mostly black moves far less than its neighbour. With one magnitude for a block, the small ones get noise
of many times their size and the large ones wait in the residual. The dense start shows every rank the same averages, so
that all of them know each element's usual magnitude, and it costs no byte.
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
"""Share of the mean of a parameter's run that is added to every element's unit: an element that the dense start hardly
moved can still catch up. Measured: 0.02 to 0.5 end alike on the CNN of docs/results/convergence.md; a floor of 1 after
a short start does not."""

EXPONENT = 0x7F800000
"""Mask of a float32's exponent bits. The exponent alone makes the unit a power of two: what is divided by it and
multiplied by it again is what it was, so that a residual comes back exact. That all units are rounded down alike
changes nothing in a block's signs."""

DOUBLE_BIAS = 1023
"""Bias of a float64's exponent."""

SMALLEST, LARGEST = 2.0**-60, 2.0**60
"""Limits of a unit: no gradient of a training that converges becomes infinite, or denormal, when it is divided by
it."""


class ElementScale(ElementStore):
    """Sums of magnitudes until `freeze`, units from then on: powers of two around 1 in each shard.

    The same bits on all ranks of a group: sums and products of two floats are rounded alike by every processor, and
    the means are sums in a fixed order (`fixed_order_sum`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[Layout, tuple[Tensor, Tensor]] = {}
        """Shard -> the units that `freeze` has made, and the sums that they were made of; until `confirm`."""
        self._summed_pieces: tuple[list[Piece], list[Piece]] | None = None
        """The same of what no shard holds."""

    def observe(self, layout: Layout, total: Tensor) -> None:
        """Stages the sums with the magnitudes of one more dense step; nothing where units are in use already.

        Args:
            layout: Of the shard.
            total: 1-D float32, the same bits on all ranks of the group.
        """
        sums = self.read(layout, total.device)
        if not self._shards[layout].settled:
            torch.add(sums, total.abs(), out=self.stage(layout, total.device))

    def freeze(self, revocable: bool = False) -> None:
        """Turns the committed sums into units, where no units are in use yet; the host waits for nothing.

        Args:
            revocable: Keeps the sums, in the memory that was theirs for staging, until `confirm` or `revoke`.
        """
        for layout, shard in self._shards.items():
            if shard.settled:
                continue
            sums, spare, shard.spare = shard.value, shard.spare, None
            if revocable:
                shard.value = torch.empty_like(sums) if spare is None else spare
                self._sums[layout] = shard.value, sums
            else:
                keep_until_read(spare)
            _write_units(sums, [(item.start, item.stop) for item in layout.slices], shard.value)
        pieces = [
            Piece(piece.name, piece.start, torch.empty_like(piece.value) if revocable else piece.value)
            for piece in self._pieces
        ]
        for piece, units in zip(self._pieces, pieces, strict=True):
            _write_units(piece.value, [(0, piece.value.numel())], units.value)
        if revocable:
            self._summed_pieces = pieces, self._pieces
        self._pieces = pieces

    def confirm(self) -> None:
        """Lets go of the sums that a revocable `freeze` has kept."""
        keep_until_read(*(sums for _, sums in self._sums.values()))
        if self._summed_pieces is not None:
            keep_until_read(*(piece.value for piece in self._summed_pieces[1]))
        self._sums.clear()
        self._summed_pieces = None

    def revoke(self) -> None:
        """Puts the sums back that a revocable `freeze` has kept, but for those whose units have been used or moved."""
        for layout, (units, sums) in self._sums.items():
            shard = self._shards.get(layout)
            if shard is not None and shard.value is units and not shard.settled:
                keep_until_read(units)
                shard.value = sums
        if self._summed_pieces is not None and self._summed_pieces[0] is self._pieces:
            keep_until_read(*(piece.value for piece in self._pieces))
            self._pieces = self._summed_pieces[1]
        self.confirm()

    def units(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns the units of `layout`, 1-D, 1 where the dense start was zero; a view, not to be changed."""
        return self.settle(layout, device, 1.0)

    def rescale(self, factor: float | Tensor) -> None:
        """Changes nothing: units are relative to their shard, and the scale of a block holds the rest."""


def _write_units(sums: Tensor, runs: Sequence[tuple[int, int]], units: Tensor) -> None:
    """Writes the units of one shard.

    Args:
        sums: 1-D float32, of magnitudes.
        runs: Start and stop of each parameter's elements in it, ascending and without gaps.
        units: Like `sums`; overwritten; may be `sums`.
    """
    if not sums.numel():
        return
    totals = [fixed_order_sum(sums[start:stop]) for start, stop in runs]
    # Counts are Python numbers: as a tensor they would make the host wait for a copy to the device.
    mean = [fixed_order_sum(torch.stack(totals)) / sums.numel()]
    means = torch.stack(mean + [total / (stop - start) for total, (start, stop) in zip(totals, runs, strict=True)])
    above = _power_of_two_above(means)
    whole = torch.where(means[0] > 0.0, above[0], 1.0)
    floors = torch.where(means[1:] > 0.0, FLOOR * above[1:] / whole, 1.0)  # zeros end as 1
    torch.div(sums, whole, out=units)
    for (start, stop), floor in zip(runs, floors, strict=True):
        units[start:stop].add_(floor)
    power_of_two_(units)


def fixed_order_sum(values: Tensor) -> Tensor:
    """Returns the sum in float64, 0-dim, with the same bits on every processor.

    The second half is added to the first until one number is left. `Tensor.sum` and `mean` add in an order that depends
    on the instruction set and the number of threads: a mean next to a power of two could then give ranks other units.

    Args:
        values: 1-D floating-point; read.
    """
    total = values.to(torch.float64, copy=True)
    while total.numel() > 1:
        half = (total.numel() + 1) // 2
        total[: total.numel() - half] += total[half:]
        total = total[:half]
    return total.sum()


def _power_of_two_above(means: Tensor) -> Tensor:
    """Returns the powers of two above float64 numbers >= 0, at least 2^-100; 1 for what is not finite."""
    exponents = (means.view(torch.int64) >> 52) + 1
    above = exponents.clamp_(DOUBLE_BIAS - 100, DOUBLE_BIAS + 1023).bitwise_left_shift_(52).view(torch.float64)
    return torch.where(means.isfinite(), above, 1.0)


def power_of_two_(units: Tensor) -> Tensor:
    """Rounds positive float32 numbers down to powers of two within the limits of a unit, in place, and returns them."""
    units.clamp_(SMALLEST, LARGEST).view(torch.int32).bitwise_and_(EXPONENT)
    return units
