"""Inputs whose reduction is exact in any order of its operations, so that results are compared by `==`.

A sum of integers is exact as long as no partial sum leaves the range in which the type holds every integer: with n
ranks the inputs stay within +-(that limit / n). The inputs of a product are -1, 1 and a few 2s; minimum and maximum are
exact for any input. Each rank's input repeats a pattern of its own with a prime period. So the expected result needs
arithmetic for one period only, however long the tensor is, and a slice in the wrong place is detected.

Source: nccl-tests, verifiable/verifiable.h, for the idea of inputs with an order-independent sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.bench.nccl_tests.dtypes import MULSUM_FACTOR, NO_ARITHMETIC, ElementType

PERIOD = 4093
"""Elements after which an input repeats: a prime, so that no power of two is a multiple of it."""

_FACTORS_OF_TWO = 4
"""Number of ranks whose inputs of a product contain 2: the largest product, 2^4, fits into every type."""

AVERAGE_UNITS = 2
"""Allowed error of an average of floating-point numbers, in units in the last place, as in nccl-tests; other results
must be exact."""


@dataclass(frozen=True, slots=True)
class ExactInputs:
    """Inputs of all ranks for one operation, and their exact reduction.

    Attributes:
        ranks: Number of ranks.
        element: Type of the elements.
        operation: `sum`, `prod`, `max`, `min`, `avg`, `mulsum`, or `none`.
        seed: Seed of the inputs.
    """

    ranks: int
    element: ElementType
    operation: str
    seed: int

    def of(self, rank: int, start: int, numel: int) -> Tensor:
        """Returns the elements `start` to `start + numel` of a rank's input, as a 1-D tensor on the CPU."""
        return _repeat(_narrow(self._pattern(rank), self.element), start, numel)

    def joined(self, pieces: list[tuple[int, int]], numel: int) -> Tensor:
        """Returns pieces of the ranks' inputs, one after the other, as a 1-D tensor on the CPU.

        Args:
            pieces: (rank, first element) of each piece.
            numel: Elements of each piece.
        """
        if not pieces or not numel:
            return torch.empty(0, dtype=self.element.torch)
        return _concatenate([self.of(rank, start, numel) for rank, start in pieces])

    def reduced(self, start: int, numel: int) -> Tensor:
        """Returns the elements `start` to `start + numel` of the reduction over all ranks' inputs."""
        patterns = torch.stack([self._pattern(rank) for rank in range(self.ranks)])
        total = {
            "sum": patterns.sum(0),
            "avg": patterns.sum(0),
            "mulsum": patterns.sum(0) * int(MULSUM_FACTOR),
            "prod": patterns.prod(0),
            "max": patterns.amax(0),
            "min": patterns.amin(0),
        }[self.operation]
        if self.operation == "avg":
            return _repeat((total.double() / self.ranks).to(self.element.torch), start, numel)
        return _repeat(_narrow(total, self.element), start, numel)

    def _pattern(self, rank: int) -> Tensor:
        """Returns one period of a rank's input as int64."""
        index = torch.arange(PERIOD, dtype=torch.int64)
        # Two rounds of multiply and fold: neighbours must not look alike. Constants: Knuth, TAOCP volume 3, 6.4.
        mixed = (index + rank * 1009 + self.seed * 7919 + 1) * 2654435761 % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32 >> 7
        if self.operation == "prod":
            # A product of signs, times two on the first ranks.
            twos = 2 if rank < _FACTORS_OF_TWO else 1
            signs = 1 - 2 * (mixed % 2) if self.element.signed else torch.ones_like(mixed)
            return torch.where(mixed % 3 == 0, signs * twos, signs)
        divisor = self.ranks * (int(MULSUM_FACTOR) if self.operation == "mulsum" else 1)
        limit = max(1, min(self.element.exact, 2**20) // divisor)
        # An average is scaled before it is summed: without cancellation its error is relative to the result.
        signed = self.element.signed and self.operation != "avg"
        return mixed % (2 * limit + 1) - limit if signed else mixed % (limit + 1)


def count_wrong(output: Tensor, expected: Tensor, inputs: ExactInputs) -> int:
    """Returns the number of wrong elements: those that differ, or by too much in a floating-point average.

    Args:
        output: Result to check, 1-D on any device.
        expected: Exact result, of the same shape and dtype, on the CPU.
        inputs: Inputs from which it was computed.
    """
    found = output.cpu()
    if inputs.operation == "avg" and inputs.element.floating:
        # Half a unit each for rounding 1/n, for the product with it, and for each of n - 1 additions.
        units = max(AVERAGE_UNITS, (inputs.ranks + 1) / 2)
        gap = torch.finfo(found.dtype).eps * expected.double().abs() * units
        # Written so that NaN counts as wrong.
        return int((~((found.double() - expected.double()).abs() <= gap)).sum().item())
    if found.dtype in NO_ARITHMETIC:
        return int((_bits(found) != _bits(expected)).sum().item())
    return int((found != expected).sum().item())


def _narrow(pattern: Tensor, element: ElementType) -> Tensor:
    if element.torch is torch.uint32:
        return pattern.to(torch.int32).view(torch.uint32)
    return pattern.view(torch.uint64) if element.torch is torch.uint64 else pattern.to(element.torch)


def _repeat(pattern: Tensor, start: int, numel: int) -> Tensor:
    shifted = _bits(pattern).roll(-(start % PERIOD))
    repeated = shifted.repeat(-(-numel // PERIOD))[:numel] if numel else shifted[:0]
    return repeated.view(pattern.dtype)


def _concatenate(pieces: list[Tensor]) -> Tensor:
    return torch.cat([_bits(piece) for piece in pieces]).view(pieces[0].dtype)


def _bits(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor as integers of the same width, because torch copies and compares all of those."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
