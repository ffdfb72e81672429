"""`gradwire bench kernels` compares the speed of the compressors' kernels with that of a copy and of torch.

`of_floor` is the share of the measured copy bandwidth that a kernel reaches on the bytes it cannot avoid; it may
exceed 1 where a kernel reads more than it writes. `speedup` is over the best torch composition, timed in turns with
the kernel in the same run. Both use the fastest of the repeats: what disturbs a run only ever makes it slower.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from gradwire.bench.arguments import CommandParser, check_memory, check_number, check_output
from gradwire.bench.kernels.cases import SETS, KernelCase, Step, all_cases
from gradwire.bench.terminal import (
    STDOUT,
    CleanConsole,
    StatusLine,
    add_json_option,
    complain,
    right_columns,
    write_json,
)

_HEAD_START_CYCLES = 2_000_000
"""About a millisecond: the device waits while the host starts the kernels, so that their launches are not timed."""
DEFAULT_NUMEL = 25 * 1024 * 1024 // 4
"""25 MiB of float32: the size of DDP's bucket."""
_MOST_NUMEL = 2**31 - 1024
"""Upper limit of elements: kernels that write positions count elements in 32 bits."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Speed of one kernel, a row of the table."""

    kernel: str
    nbytes: int
    """Bytes the kernel must read and write at least."""
    seconds: float
    """Time of the fastest run."""
    composed_seconds: float
    """Time of the fastest run of the torch composition."""
    bytes_per_second: float
    """`nbytes` divided by `seconds`."""
    of_floor: float
    """`bytes_per_second` divided by that of a copy."""
    speedup: float
    """`composed_seconds` divided by `seconds`."""


def _seconds(step: Step, turn: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, stop = (torch.Event(device, enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        step(turn % SETS)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3
    begin = time.perf_counter()
    step(turn % SETS)
    return time.perf_counter() - begin


def best_seconds(steps: Sequence[Step], repeats: int, device: torch.device) -> list[float]:
    """Times steps in turns, and returns the fastest run of each.

    Args:
        steps: Functions to time, each called with the number of a set of buffers, below `SETS`.
        repeats: Number of runs of each that count; two before them touch new pages and fill caches.
        device: Device on which they run.

    Returns:
        Seconds of the fastest run of each step.
    """
    best = [float("inf")] * len(steps)
    for turn in range(repeats + 2):
        for number, step in enumerate(steps):
            seconds = _seconds(step, turn, device)
            if turn >= 2:
                best[number] = min(best[number], seconds)
    return best


def measure(case: KernelCase, buffers: list[tuple[Tensor, Tensor]], repeats: int) -> KernelResult:
    """Times one case, its composition and a copy in turns.

    Args:
        case: Case to time.
        buffers: Pairs (target, source) of tensors of the gradient's size, for the copy.
        repeats: Number of runs of each, of which the fastest counts.
    """
    device = buffers[0][0].device

    def copy(i: int) -> None:
        buffers[i][0].copy_(buffers[i][1])

    best = best_seconds([case.ours, case.composed, copy], repeats, device)
    copy_rate = 2 * buffers[0][0].nbytes / best[2]
    rate = case.nbytes / best[0]
    return KernelResult(case.name, round(case.nbytes), best[0], best[1], rate, rate / copy_rate, best[1] / best[0])


def _measure_all(
    cases: Mapping[str, Callable[[], KernelCase]], buffers: list[tuple[Tensor, Tensor]], repeats: int
) -> list[KernelResult]:
    """Returns one result for each case, with a line of progress between them."""
    status, results = StatusLine(), []
    for number, (name, case) in enumerate(cases.items()):
        status.show(f"{number + 1}/{len(cases)}  {name}")
        results.append(measure(case(), buffers, repeats))
    status.clear()
    return results


def _table(results: list[KernelResult], copy_note: str) -> Table:
    figures = right_columns("MB", "ms", "GB/s", "of a copy", "torch ms", "vs torch")
    table = Table("kernel", *figures, title=copy_note, title_justify="left", box=SIMPLE_HEAD)
    for row in results:
        table.add_row(
            row.kernel,
            f"{row.nbytes / 1e6:.2f}",
            f"{row.seconds * 1e3:.2f}",
            f"{row.bytes_per_second / 1e9:.1f}",
            f"{row.of_floor:.2f}",
            f"{row.composed_seconds * 1e3:.2f}",
            f"{row.speedup:.1f}x",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="gradwire bench kernels", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_json_option(parser)
    parser.add_argument("--numel", type=int, default=DEFAULT_NUMEL, help="elements, a multiple of 1024")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each kernel; the fastest counts")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; may be repeated")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Checks that the options have sensible values, and that the files can be written.

    Raises:
        ValueError: A value does not fit; the message names it.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda`, but torch sees no CUDA device")
    check_number("--numel", options.numel, 1024, _MOST_NUMEL)
    if options.numel % 1024:
        raise ValueError(f"`--numel`: found {options.numel}, wanted a multiple of 1024")
    check_number("--repeats", options.repeats, 1, 10**6)
    if options.device == "cpu":
        check_memory("--numel", 2 * SETS * 4 * options.numel, "the tensors")
    check_output("--json", options.json)


def main(argv: list[str]) -> int:
    """Runs `gradwire bench kernels`; returns 0, 2 for a bad option, or 1 if the JSON cannot be written.

    Args:
        argv: Words of the command line after `kernels`.
    """
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    try:
        _check(options)
        cases = all_cases(options.numel, device)
        unknown = [name for name in options.kernel or () if name not in cases]
        if unknown:
            raise ValueError(f"no kernel `{unknown[0]}`; there are {', '.join(cases)}")
    except ValueError as error:
        complain("bench kernels", error)
        return 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the native kernels use one thread; so does what they are compared with
    try:
        buffers = [
            (torch.zeros(options.numel, device=device), torch.ones(options.numel, device=device)) for _ in range(SETS)
        ]
        results = _measure_all({name: cases[name] for name in options.kernel or cases}, buffers, options.repeats)
    finally:
        torch.set_num_threads(threads)
    mebibytes = options.numel * 4 / 2**20
    if options.json != STDOUT:
        console = CleanConsole(highlight=False)
        console.print(
            _table(
                results,
                f"{mebibytes:.3g} MiB of float32 on {options.device}{', one thread' * (options.device == 'cpu')}",
            )
        )
        console.print(
            "MB: what a kernel must read and write at least; of a copy: its rate over that of a copy in memory;\n"
            "vs torch: how many times as fast as the best that was composed of torch's own operations"
        )
    try:
        write_json(options.json, {"results": [asdict(row) for row in results]})
    except RuntimeError as error:
        complain("bench kernels", error)
        return 1
    return 0
