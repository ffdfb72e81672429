"""One process of `gradwire selftest`: it runs the checks of one part, and prints the result of each as a line of JSON.

Each part has its own processes, so that a crash ends one part only.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch
import torch.distributed as dist

from gradwire.bench.kernels.calls import KernelSet, cpu_kernels, cuda_kernels
from gradwire.bench.selftest.checks import FAIL, PASS, SKIPPED, Attempt, Mismatch, NotHere, SelftestResult
from gradwire.bench.selftest.collective_checks import TIMEOUT, CollectiveChecks
from gradwire.bench.selftest.coverage import (
    NcclSite,
    RecordedKernels,
    recorded_launches,
    touched_calls,
    touched_functions,
    touched_kernels,
)
from gradwire.bench.selftest.facts import machine_facts
from gradwire.bench.selftest.kernel_checks import bandwidths, kernel_attempts
from gradwire.bench.selftest.training_checks import TrainingChecks
from gradwire.comms.environment import launcher_number, launcher_variables
from gradwire.compressors.kernels.cuda.require import CudaKernelsError, require_cupy
from gradwire.compressors.kernels.dispatch import Kernels

RECORD = "selftest"
"""Key of the lines of JSON that are records; its value is the kind of record."""
PLANNED, BEGUN, ENDED, BANDWIDTH, COVERAGE, FACTS, LOSSES, NOTE = (
    "planned", "begun", "ended", "bandwidth", "coverage", "facts", "losses", "note",
)  # fmt: skip
KERNELS, COLLECTIVES, TRAININGS = "kernels", "collectives", "trainings"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """Settings of one part, the same on all of its ranks.

    Attributes:
        part: Name of the part in the report.
        kind: `facts`, `kernels`, `collectives` or `trainings`.
        device: `cpu` or `cuda`.
        numel: Elements of the largest input of a kernel.
        bandwidth_numel: Elements of the gradient whose bandwidth is measured; 0 measures none.
    """

    part: str
    kind: str
    device: str
    numel: int = 0
    bandwidth_numel: int = 0


def say(record: str, value: object) -> None:
    """Sends a record to the process that started this one, as a line of JSON on stdout.

    Args:
        record: Kind of record, one of the constants above.
        value: Content of the record, of types that JSON has.
    """
    print(json.dumps({RECORD: record, "value": value}), flush=True)


def rank_device(kind: str) -> torch.device:
    """Returns the device of this rank; a CUDA device is made the current one. Ranks share GPUs if there are too few.

    The GPU is chosen by the rank and not by the local rank, because all ranks are on this machine, although gradwire is
    told that they are on several nodes.

    Args:
        kind: `cpu` or `cuda`.
    """
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", launcher_number(launcher_variables(), "RANK", 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def go_through(part: str, attempts: Iterable[tuple[str, Attempt]], *, alone: bool) -> None:
    """Runs one check after the other, and sends the result of each.

    Args:
        part: Name of the part in the report.
        attempts: Name and function of each check.
        alone: Whether this is the only rank of the part. If not, an unexpected error ends this process, because the
            other ranks may wait for collectives that it no longer issues; a wrong result does not.
    """
    planned = list(attempts)
    say(PLANNED, [name for name, _ in planned])
    for name, attempt in planned:
        say(BEGUN, name)
        result, goes_on = _tried(part, name, attempt)
        say(ENDED, asdict(result))
        if not goes_on and not alone:
            sys.exit(f"ended after the error in `{name}`")


def _tried(part: str, name: str, attempt: Attempt) -> tuple[SelftestResult, bool]:
    """Runs one check; returns its result, and whether several ranks can go on: False after an unexpected error."""
    began = time.perf_counter()
    outcome, goes_on = SelftestResult(part=part, name=name, outcome=PASS), True
    try:
        outcome = replace(outcome, worst_difference=attempt())
    except NotHere as error:
        outcome = replace(outcome, outcome=SKIPPED, reason=str(error))
    except Mismatch as error:
        outcome = replace(outcome, outcome=FAIL, reason=str(error), worst_difference=error.difference)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the check has found
        reason = f"{type(error).__name__}: {str(error).strip() or 'without a word'}"
        outcome, goes_on = replace(outcome, outcome=FAIL, reason=reason), False
    return replace(outcome, seconds=time.perf_counter() - began), goes_on


def check_kernels(settings: PartSettings) -> None:
    """Checks the kernels of a device, sends which of them were called, and then, on CUDA, measures their bandwidth.

    If the CUDA kernels cannot be used on this machine, one skipped check says why, and no bandwidth is measured.
    """
    device = rank_device(settings.device)
    on_cuda = device.type == "cuda"
    functions: set[str] = set()
    ours: KernelSet = cuda_kernels(device) if on_cuda else cpu_kernels()
    ours = replace(ours, kernels=cast(Kernels, RecordedKernels(ours.kernels, functions)))
    unusable = _why_unusable(device) if on_cuda else None
    attempts = kernel_attempts(ours, settings.numel) if unusable is None else [("every kernel", _not_here(unusable))]
    with recorded_launches() as launched:
        go_through(settings.part, attempts, alone=True)
    say(COVERAGE, asdict(touched_functions(functions, settings.device)))
    if on_cuda:
        say(COVERAGE, asdict(touched_kernels(launched)))
    if unusable is not None or not settings.bandwidth_numel:
        return
    for name, measure in bandwidths(ours, settings.bandwidth_numel):
        try:
            say(BANDWIDTH, asdict(measure()))
        except torch.OutOfMemoryError:
            say(NOTE, f"bandwidth of {name}: the GPU has no memory left for {settings.bandwidth_numel} values")
        torch.cuda.empty_cache()


def _why_unusable(device: torch.device) -> str | None:
    """Returns why the CUDA kernels cannot be used on this machine; None if they can."""
    try:
        require_cupy(device.index)
    except CudaKernelsError as error:
        return str(error)
    return None


def _not_here(reason: str) -> Attempt:
    def attempt() -> float:
        raise NotHere(reason)

    return attempt


def check_together(settings: PartSettings) -> None:
    """Runs the checks of collectives or trainings as one of several ranks, and sends the results."""
    device = rank_device(settings.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    alone = group.size() == 1
    if settings.kind == COLLECTIVES:
        touched: set[NcclSite] = set()
        go_through(settings.part, CollectiveChecks(group, device, touched).attempts(), alone=alone)
        if device.type == "cuda":
            say(COVERAGE, asdict(touched_calls(touched)))
    else:
        trainings = TrainingChecks(device)
        go_through(settings.part, trainings.attempts(), alone=alone)
        say(LOSSES, trainings.losses)
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Runs the checks of one part as one of its ranks; returns the exit status 0, also if checks failed.

    Args:
        argv: A list of one item, a `PartSettings` as JSON.
    """
    settings = PartSettings(**json.loads(argv[0]))
    torch.set_num_threads(1)
    if settings.kind == FACTS:
        say(FACTS, machine_facts())
        return 0
    (check_kernels if settings.kind == KERNELS else check_together)(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
