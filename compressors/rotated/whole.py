"""Matrix products whose bits do not depend on where they are computed.

Those of a BLAS depend on the processor, on the number of threads, even on where a tensor lies: no order of summation is
promised. So factors are rounded to whole numbers so small that every partial sum of their product is a whole number
that float64 can hold: then no order changes a bit. Element by element +, -, * and / are rounded alike everywhere, as
IEEE 754 says; so are square roots by `roots_of`. The host waits for no device.
"""

import math

import numpy as np
import torch
from torch import Tensor

LARGEST_WHOLE = 53
"""Bits of the whole numbers up to which float64 holds all. Source: IEEE 754."""

_BIAS, _MANTISSA_BITS = 1023, 52
"""Bias of float64's exponent, and bits of the mantissa below it. Source: IEEE 754."""


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2 ** exponent, exactly: float64 of an integer tensor, whose values lie between -1022 and 1023."""
    return ((exponent.long() + _BIAS) << _MANTISSA_BITS).view(torch.float64)


def roots_of(x: Tensor) -> Tensor:
    """Returns the square roots, float64, rounded as IEEE 754 says.

    Torch's own on a CPU are a library's, as MKL's, which goes by the processor: 48 of 4,000 were not the nearest (torch
    2.13, AMD EPYC, 2026-11-26).
    """
    return x.sqrt() if x.is_cuda else torch.from_numpy(np.sqrt(x.numpy()))


def rounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor | float]:
    """Rounds to whole numbers times one power of two.

    Args:
        x: Float; of any shape, not empty.
        bits: The largest magnitude gets so many.

    Returns:
        The whole numbers, float64 of x' shape, and the power of two: NaN if x has an inf or NaN; 0-dim float64 on a
        device, where the host would have to wait for a number.
    """
    if x.is_cuda:
        largest = x.abs().amax().double()
        exponents = torch.frexp(largest).exponent - bits
        whole = (x.double() * power_of_two(-exponents)).round_()
        return whole, torch.where(largest.isfinite(), power_of_two(exponents), torch.nan)
    peak = float(x.abs().amax())
    if not math.isfinite(peak):
        return x.double(), math.nan
    exponent = math.frexp(peak)[1] - bits
    return (x.double() * math.ldexp(1.0, -exponent)).round_(), math.ldexp(1.0, exponent)


def bits_for(inner: int) -> int:
    """Bits of both factors of a product with sums of `inner` terms."""
    return (LARGEST_WHOLE - math.ceil(math.log2(max(2, inner)))) // 2


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float64, of as many bits of both as leave it the same wherever it is computed.

    Args:
        a: (..., rows, inner), float.
        b: (..., inner, columns), float.
    """
    bits = bits_for(a.shape[-1])
    (left, unit), (right, other) = rounded(a, bits), rounded(b, bits)
    return (left @ right).mul_(unit * other)


def gram(rows: Tensor) -> Tensor:
    """Returns `product` of (..., rows, inner) and its transpose, which are rounded once."""
    whole, unit = rounded(rows, bits_for(rows.shape[-1]))
    return (whole @ whole.mT).mul_(unit * unit)


def total(x: Tensor) -> Tensor:
    """Returns the sum of all elements, 0-dim float64, the same wherever it is computed."""
    whole, unit = rounded(x, LARGEST_WHOLE - math.ceil(math.log2(max(2, x.numel()))))
    return whole.sum() * unit


def lengths(columns: Tensor) -> Tensor:
    """Returns the lengths of columns: (parts, 1, length) float64 of (parts, length, length)."""
    whole, unit = rounded(columns, bits_for(columns.shape[1]))
    return roots_of(whole.square().sum(1, keepdim=True)).mul_(unit)
