"""Types of a check: its function, its result, and the exceptions by which it fails or is skipped."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"

Attempt = Callable[[], float]
"""Function that runs a check, and returns the largest difference found, 0 if all bits are the same.

It raises `Mismatch` if the difference is too large, and `NotHere` if the check cannot be run on this machine.
"""


class Mismatch(Exception):
    """Error of a check whose result is wrong; later checks can still be run.

    Args:
        reason: Description of the result and of the expected one.
        difference: Largest difference between them.
    """

    def __init__(self, reason: str, difference: float) -> None:
        super().__init__(reason)
        self.difference = difference


class NotHere(Exception):
    """Error of a check that needs something this machine does not have; the message names it. The check is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestResult:
    """Result of one check.

    Attributes:
        part: Name of the part of the self-test to which it belongs, such as `NCCL, 1 rank`.
        name: Name of the check.
        outcome: `pass`, `fail` or `skipped`.
        reason: Reason for which it failed or was skipped; empty if it passed.
        worst_difference: Largest difference from the expected result; None if nothing was compared.
        seconds: Duration of the check.
    """

    part: str
    name: str
    outcome: str
    reason: str = ""
    worst_difference: float | None = None
    seconds: float = 0.0


def compare(ours: Tensor, wanted: Tensor, tolerance: float = 0.0) -> float:
    """Compares two tensors of one shape and dtype; returns their largest difference.

    Args:
        ours: Result, on any device.
        wanted: Expected result, on the CPU.
        tolerance: Allowed difference, divided by the largest magnitude in `wanted`. At 0 all bits must be the same,
            also the signs of zeros, except that any NaN equals any other.

    Raises:
        Mismatch: The difference is larger than allowed.
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
