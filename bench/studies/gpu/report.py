"""Measures a machine with a GPU for docs/results/gpu.md, as Markdown, in under eight minutes.

    python -m gradwire.bench.studies.gpu.report                    # on the terminal
    python -m gradwire.bench.studies.gpu.report --output FILE      # and into a file

The tests marked `gpu` run too. A figure belongs to the machine, the versions, the date and the command above it.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gradwire.bench.doctor.local import versions
from gradwire.bench.kernels.cases import SETS, KernelCase
from gradwire.bench.kernels.command import KernelResult, measure
from gradwire.bench.machine import machine_line
from gradwire.bench.selftest.facts import cuda_versions
from gradwire.bench.studies.gpu import step as gpu_step
from gradwire.bench.studies.gpu.cases import gpu_cases
from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.compressors.kernels.cuda.require import CudaKernelsError, require_cupy

MEBIBYTES = (25, 256)
TESTS = ("tests/csrc", "tests/comms/transport/test_nccl.py")
TEST_SECONDS = 240
CHECKOUT = Path(__file__).resolve().parents[3]


def launches(case: KernelCase) -> int:
    """Returns how many kernels one run of the case launches, by torch's profiler, without copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        case.ours(0)
        torch.cuda.synchronize()
    events = [event.name for event in trace.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in events)


def row(result: KernelResult, started: int) -> str:
    """Returns one line of the table of kernels.

    Args:
        result: Measurement of one kernel.
        started: Number of kernels that the case launches.
    """
    return (
        f"| {result.kernel} | {result.seconds * 1e6:.1f} | {result.bytes_per_second / 1e9:.0f} | "
        f"{result.of_floor:.2f} | {result.speedup:.1f} | {started} |"
    )


def kernel_table(mebibytes: int, device: torch.device) -> Iterator[str]:
    """Measures all kernels on gradients of `mebibytes` MiB of float32 and yields the table, a line each."""
    numel = mebibytes * 2**20 // 4
    buffers: list[tuple[Tensor, Tensor]] = [
        (torch.zeros(numel, device=device), torch.ones(numel, device=device)) for _ in range(SETS)
    ]
    yield f"## Kernels, {mebibytes} MiB of float32\n"
    yield "| kernel | µs | GB/s | share of a copy's bandwidth | times as fast as torch's composition | launches |"
    yield "|---|---|---|---|---|---|"
    for make in gpu_cases(numel, device).values():
        case = make()
        result = measure(case, buffers, repeats=15)
        yield row(result, launches(case))
        del case
        torch.cuda.empty_cache()


def step_lines(cost: gpu_step.StepCost) -> Iterator[str]:
    """Yields the lines of the table of the hook's own cost."""
    yield "## The hook in a world of one rank, 50-layer residual network\n"
    yield "| step without, ms | step with, ms | cost of the hook | calls that wait for the device |"
    yield "|---|---|---|---|"
    yield (
        f"| {cost.bare_seconds * 1e3:.2f} | {cost.hook_seconds * 1e3:.2f} | {cost.share:.2%} | "
        f"{', '.join(cost.blocking) or 'none'} |"
    )


def tested_lines() -> Iterator[str]:
    """Runs the tests marked `gpu` and yields their failures and the last line; nothing without a checkout."""
    found = [name for name in TESTS if (CHECKOUT / name).exists()]
    if not found:
        return
    yield f"## pytest -m gpu {' '.join(found)}\n"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *found],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            check=False,
        )
        words = done.stdout.splitlines() or done.stderr.splitlines()  # the latter where there is no pytest
    except subprocess.TimeoutExpired:
        words = [f"not through after {TEST_SECONDS} s"]
    yield from (f"    {line}" for line in words if line.startswith(("FAILED", "ERROR")) or line == words[-1])


def report(device: torch.device) -> Iterator[str]:
    """Measures everything and yields the report's lines as soon as they are known."""
    measured_with = ", ".join(f"{name} {version}" for name, version in (versions() | cuda_versions()).items())
    yield f"# A GPU's figures\n\n{machine_line()}; {measured_with}\n\n    python -m gradwire.bench.studies.gpu.report\n"
    for mebibytes in MEBIBYTES:
        yield from kernel_table(mebibytes, device)
        yield ""
    yield from step_lines(gpu_step.measure(device))
    yield ""
    yield from tested_lines()


def main(argv: list[str]) -> int:
    """Prints the report; returns the exit status: 2 if this machine has no GPU that runs the CUDA kernels."""
    parser = StudyParser("gpu.report", __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args(argv)
    try:
        require_cupy(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    except CudaKernelsError as error:
        print(f"gpu_report: {error}", file=sys.stderr)
        return 2
    lines = []
    for line in report(torch.device("cuda", torch.cuda.current_device())):
        print(line, flush=True)
        lines.append(line)
        if options.output is not None:
            options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
