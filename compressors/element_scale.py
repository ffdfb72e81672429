"""The unit that each element of a gradient is measured in before only its sign is sent.

One bit cannot say how large an element is, and the elements of a layer differ by orders of magnitude: the weight behind
a pixel that is mostly black moves far less than its neighbour. With one magnitude for a block, the small ones get noise
of many times their size and the large ones wait in the residual. The dense start shows every rank the same averages, so
that all of them know each element's usual magnitude, and it costs no byte.
Source: the scaling of layers to one magnitude before the compression and back afterwards in Li et al., 1-bit LAMB, HiPC
2022 (arXiv 2104.06069), here element by element; what the dense start has shown is frozen as the variance is in Tang et
al., 1-bit Adam, ICML 2021, section 3.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.compressors.base import Layout
from gradwire.compressors.residual import ElementStore

FLOOR = 0.125
"""Of the mean of a parameter's run, added to every element's unit: an element that the dense start hardly moved can
still catch up. Measured: 0.02 to 0.5 end alike on the CNN of docs/reference/convergence.md; a floor of 1 after a short
start does not."""

EXPONENT = 0x7F800000
"""Of a float32's bits. The exponent alone makes the unit a power of two: what is divided by it and multiplied by it
again is what it was, so that a residual comes back exact. That all units are rounded down alike changes nothing in a
block's signs."""

SMALLEST, LARGEST = 2.0**-60, 2.0**60
"""Limits of a unit: no gradient of a training that converges becomes infinite, or denormal, when it is divided by
it."""


class ElementScale(ElementStore):
    """Sums of magnitudes until `freeze`, units from then on: powers of two around 1 in each shard.

    The same bits on all ranks of a group: sums and products of two floats are rounded alike by every processor, and the
    means, whose order of summation is not fixed, enter as powers of two too.
    """

    def observe(self, layout: Layout, total: Tensor) -> None:
        """Stages the sums with the magnitudes of one more dense step.

        Args:
            layout: Of the shard.
            total: 1-D float32, the same bits on all ranks of the group.
        """
        torch.add(self.read(layout, total.device), total.abs(), out=self.stage(layout, total.device))

    def freeze(self) -> None:
        """Turns the committed sums into units, in place."""
        for sums, runs in self._shards_and_runs():
            mean = _power_of_two(sums)
            for run in runs:
                own = _power_of_two(sums[run])
                if mean and own:
                    power_of_two_(sums[run].div_(mean).add_(FLOOR * own / mean))
                else:
                    sums[run].fill_(1.0)

    def units(self, layout: Layout, device: torch.device) -> Tensor:
        """Returns the units of `layout`, 1-D, 1 where the dense start was zero; a view, not to be changed."""
        return self.settle(layout, device, 1.0)

    def rescale(self, factor: float) -> None:
        """Changes nothing: units are relative to their shard, and the scale of a block holds the rest."""

    def _shards_and_runs(self) -> Iterator[tuple[Tensor, list[slice]]]:
        """Yields every committed tensor and where in it the parameters lie; forgets the buffers for staging."""
        for layout, shard in self._shards.items():
            shard.spare = None
            yield shard.value, [slice(item.start, item.stop) for item in layout.slices]
        for piece in self._pieces:
            yield piece.value, [slice(None)]


def power_of_two_(units: Tensor) -> Tensor:
    """Rounds positive float32 numbers down to powers of two within the limits of a unit, in place, and returns them."""
    units.clamp_(SMALLEST, LARGEST).view(torch.int32).bitwise_and_(EXPONENT)
    return units


def _power_of_two(magnitudes: Tensor) -> float:
    """Returns the power of two above the mean, at least 2^-100; 0 for zeros and for nothing."""
    mean = float(magnitudes.mean(dtype=torch.float64)) if magnitudes.numel() else 0.0
    return 2.0 ** max(-100, math.frexp(mean)[1]) if mean else 0.0
