"""What a check is: a name, something to try, and how it went."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"

Attempt = Callable[[], float]
"""Tries something and returns the worst difference found, 0 where the bits are the same.

Raises `Mismatch` where the difference is too large, `NotHere` where it cannot be tried on this machine.
"""


class Mismatch(Exception):
    """A result is wrong; what is checked next can still be right.

    Args:
        reason: What was found, and what was wanted.
        difference: The worst one.
    """

    def __init__(self, reason: str, difference: float) -> None:
        super().__init__(reason)
        self.difference = difference


class NotHere(Exception):
    """This machine has not what the check needs; the message says what that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestResult:
    """How one check went.

    Attributes:
        part: What it belongs to: `kernels`.
        name: Of the check.
        outcome: `pass`, `fail` or `skipped`.
        reason: Why it failed or was skipped; empty where it passed.
        worst_difference: From what was wanted; None where nothing was compared.
        seconds: That it took.
    """

    part: str
    name: str
    outcome: str
    reason: str = ""
    worst_difference: float | None = None
    seconds: float = 0.0


def compare(ours: Tensor, wanted: Tensor, tolerance: float = 0.0) -> float:
    """The largest difference between two tensors of one shape and dtype.

    Args:
        ours: On any device.
        wanted: On the CPU.
        tolerance: Allowed, over the largest magnitude that is wanted; 0 wants the same bits, signs of zeros too, but
            any NaN for a NaN.

    Raises:
        Mismatch: It is larger than allowed.
    """
    found = ours.cpu()
    if not wanted.is_floating_point():
        found, wanted = found.to(torch.int64), wanted.to(torch.int64)
    same = found == wanted
    if wanted.is_floating_point():
        same = (same & (found.signbit() == wanted.signbit())) | (found.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    off = (found.double() - wanted.double()).abs()
    worst = float(off.nan_to_num(nan=torch.inf).max())
    if tolerance and worst <= tolerance * float(wanted.double().abs().max()):
        return worst
    place = int((~same).flatten().nonzero()[0]) if not tolerance else int(off.flatten().argmax())
    raise Mismatch(
        f"{int((~same).sum())} of {wanted.numel()} elements differ; element {place} is "
        f"{found.flatten()[place].item():.9g}, wanted {wanted.flatten()[place].item():.9g}",
        worst,
    )
