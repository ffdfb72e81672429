"""Checks of every kernel: its results against its reference, and its bandwidth against a copy of as many bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gradwire.bench.kernels.calls import CALLS, CallMaker, KernelInputs, KernelSet, reference_kernels
from gradwire.bench.kernels.cases import SETS
from gradwire.bench.kernels.command import best_seconds
from gradwire.bench.selftest.checks import Attempt, Mismatch, compare

SMALL: tuple[tuple[int, float], ...] = ((1, 1.0), (1025, 1.0), (1025, 1e-41), (70_001, 1.0))
"""(elements, factor on their values) of the small inputs: one element; a block and one more; subnormal numbers; several
blocks of which the last is not full."""
REPEATS = 15
"""Number of runs, of which the fastest counts: other load only makes runs slower."""


@dataclass(frozen=True, slots=True)
class KernelBandwidth:
    """Bandwidth of one kernel beside a copy.

    Attributes:
        kernel: Name of the call.
        nbytes: Bytes that it must read and write at least.
        seconds: Time of the fastest run.
        of_copy: Time of a copy that reads and writes as many bytes, divided by `seconds`: 1 is as fast as a copy.
    """

    kernel: str
    nbytes: int
    seconds: float
    of_copy: float


def calls_on(ours: KernelSet) -> dict[str, CallMaker]:
    """Returns name -> maker of each call that is checked; the same for every set of kernels."""
    return CALLS


def kernel_attempts(ours: KernelSet, numel: int) -> Iterator[tuple[str, Attempt]]:
    """Yields the name and the function of a check for each call of the kernels.

    Args:
        ours: Kernels that are compared with the reference.
        numel: Elements of the largest input.
    """
    wanted = reference_kernels()
    sizes = (*((small, factor) for small, factor in SMALL if small < numel), (numel, 1.0))
    for name, make in calls_on(ours).items():
        yield name, _attempt(make, ours, wanted, sizes)


def _attempt(make: CallMaker, ours: KernelSet, wanted: KernelSet, sizes: tuple[tuple[int, float], ...]) -> Attempt:
    def attempt() -> float:
        worst = 0.0
        for numel, factor in sizes:
            call, twin = (make(each, KernelInputs(each.device, numel, factor)) for each in (ours, wanted))
            if call.tolerance and factor != 1.0:  # sums of subnormal products: libraries may flush them to zero
                continue
            call.run()
            twin.run()
            for place, (found, right) in enumerate(zip(call.writes, twin.writes, strict=True)):
                try:
                    worst = max(worst, compare(found, right, call.tolerance))
                except Mismatch as error:
                    raise Mismatch(
                        f"output {place} for {numel} values{f' times {factor:g}' if factor != 1.0 else ''}: {error}",
                        error.difference,
                    ) from None
        return worst

    return attempt


def bandwidths(ours: KernelSet, numel: int) -> Iterator[tuple[str, Callable[[], KernelBandwidth]]]:
    """Yields the name of each call of the kernels, and a function that measures its bandwidth.

    Args:
        ours: Kernels on a CUDA device.
        numel: Elements of the gradient.
    """
    for name, make in calls_on(ours).items():
        yield name, _measurement(name, make, ours, numel)


def _measurement(name: str, make: CallMaker, ours: KernelSet, numel: int) -> Callable[[], KernelBandwidth]:
    def measure() -> KernelBandwidth:
        calls = [make(ours, KernelInputs(ours.device, numel, alike=False)) for _ in range(SETS)]
        half = max(1, calls[0].nbytes // 2)
        sources = [torch.ones(half, dtype=torch.uint8, device=ours.device) for _ in range(SETS)]
        targets = [torch.empty_like(source) for source in sources]
        seconds, copied = best_seconds(
            [lambda i: calls[i].run(), lambda i: targets[i].copy_(sources[i])], REPEATS, ours.device
        )
        return KernelBandwidth(name, calls[0].nbytes, seconds, copied / seconds)

    return measure
