"""What each kernel costs in instructions and bytes an element, counted by running its machine code.

    python -m gradwire.bench.studies.gpu.sass_costs                       # every case, for sm_80 and sm_90
    python -m gradwire.bench.studies.gpu.sass_costs --only waterfill      # some of them
    python -m gradwire.bench.studies.gpu.sass_costs --registers           # registers and CTAs, sm_100 too

The counts are exact for the case's input. The last columns are an estimate that no GPU has confirmed: the share of the
memory's bandwidth that is left if nothing but issuing instructions (and no latency) stood in its way.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.bench.studies.gpu.sass import Kernel, compile_file
from gradwire.bench.studies.gpu.sass_cases import Arena, SassCase, all_cases
from gradwire.bench.studies.gpu.sass_machine import LANES, PARAMETERS, SECTOR, SassCounts, launch
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What an estimate needs to know of a GPU.

    Sources: NVIDIA's A100, H100 and H200 datasheets; for the units the CUDA C++ Programming Guide, "Arithmetic
    Instructions".
    """

    name: str
    architecture: int
    multiprocessors: int
    hertz: float
    """A clock that it holds; the H100's and H200's boost is up to 1.98 GHz."""
    bytes_per_second: float
    """Of its memory, as the datasheet says; a copy reaches about nine tenths."""
    float_lanes: int
    """Threads for which a multiprocessor begins a float32 operation in a clock."""


GPUS = (
    GpuRates("A100 80 GB", 80, 108, 1.41e9, 2.04e12, 64),
    GpuRates("H100 SXM", 90, 132, 1.755e9, 3.35e12, 128),
    GpuRates("H200 SXM", 90, 132, 1.755e9, 4.8e12, 128),
)
ISSUE_LANES = 128
"""Four schedulers, an instruction of a warp each."""
UNIT_LANES = {"integer": 64, "convert": 16, "memory": 32, "uniform": 64, "control": 64}
"""Threads a clock and multiprocessor; the conversions' is that of the slowest among them."""
REGISTERS, THREADS, SHARED_NBYTES = 65536, 2048, {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Of a multiprocessor."""


@dataclass(frozen=True, slots=True)
class SassCost:
    """What a case took, for each element."""

    case: SassCase
    kernel: Kernel
    instructions: float
    """Of threads: 32 for each that a warp issues."""
    units: dict[str, float]
    read: float
    """Bytes of the sectors that were read; one that was read twice counts once."""
    written: float
    asked: float
    """Bytes of the sectors that accesses asked for; what a cache serves is in it."""
    resident: int
    """CTAs that a multiprocessor holds."""

    def limits(self, gpu: GpuRates) -> tuple[float, str]:
        """Returns the share of the bandwidth that the busiest resource but memory leaves, and which one it is."""
        seconds = {"issue": self.instructions / ISSUE_LANES}
        for unit, count in self.units.items():
            lanes = gpu.float_lanes if unit == "fma" else UNIT_LANES[unit]
            seconds[unit] = count / lanes
        slowest = max(seconds, key=lambda unit: seconds[unit])
        busy = seconds[slowest] / gpu.hertz / gpu.multiprocessors
        return (self.read + self.written) / gpu.bytes_per_second / busy, slowest


def resident_ctas(kernel: Kernel, threads: int) -> int:
    """Returns how many CTAs of a kernel a multiprocessor holds: by registers, threads, shared memory and number."""
    registers = -(-kernel.registers // 8) * 8 * threads
    shared = kernel.shared_nbytes + 1024
    return min(REGISTERS // registers, THREADS // threads, SHARED_NBYTES[kernel.architecture] // shared, 32)


def cost_of(case: SassCase, kernel: Kernel) -> SassCost:
    """Runs a case's machine code, checks the results, and returns what it took.

    Raises:
        ValueError: A result has other bits than the reference's.
        NotImplementedError: An instruction is not known.
    """
    arena = Arena()
    counts: SassCounts = launch(kernel, case.blocks, case.threads, case.arguments(arena), arena.memory)
    arena.check()
    each = LANES / case.numel
    return SassCost(
        case,
        kernel,
        counts.issued() * each,
        {unit: count * each for unit, count in counts.instructions.items()},
        SECTOR * float(arena.memory.read.sum()) / case.numel,
        SECTOR * float(arena.memory.written.sum()) / case.numel,
        SECTOR * counts.sectors / case.numel,
        resident_ctas(kernel, case.threads),
    )


def heading() -> str:
    """The table's first two lines."""
    columns = ["kernel", "sm", "instructions", "integer", "bytes", "asked for", "registers", "CTAs"]
    columns += [f"{gpu.name}, at most" for gpu in GPUS]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def row(cost: SassCost) -> str:
    """One line of the table; the last columns belong to the GPUs of this architecture."""
    estimates = []
    for gpu in GPUS:
        share, limit = cost.limits(gpu)
        estimates.append("" if gpu.architecture != cost.kernel.architecture else f"{min(share, 1):.2f} ({limit})")
    numbers = (
        f"{cost.instructions:.1f} | {cost.units['integer']:.1f} | {cost.read + cost.written:.2f} | {cost.asked:.2f} | "
        f"{cost.kernel.registers} | {cost.resident}"
    )
    return f"| {cost.case.name} | {cost.kernel.architecture} | {numbers} | {' | '.join(estimates)} |"


def registers_table() -> Iterator[str]:
    """Registers, shared memory and size of every kernel of the files that have cases."""
    threads = {case.kernel: case.threads for case in all_cases()}
    yield "| kernel | sm | registers | shared, bytes | resident CTAs | instructions of the text |"
    yield "|---|---|---|---|---|---|"
    for file in ENTRY_POINTS:
        for architecture in SHARED_NBYTES:
            for name, kernel in compile_file(file, architecture).items():
                held = resident_ctas(kernel, threads.get(name, 256))
                size = len(kernel.instructions)
                yield f"| {name} | {architecture} | {kernel.registers} | {kernel.shared_nbytes} | {held} | {size} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the cases' names")
    parser.add_argument("--registers", action="store_true", help="registers and resident CTAs, nothing is run")
    given = parser.parse_args()
    if given.registers:
        for line in registers_table():
            print(line, flush=True)
        return
    compiled: dict[tuple[str, int], dict[str, Kernel]] = {}
    print(heading(), flush=True)
    for case in all_cases():
        if given.only not in case.name:
            continue
        for architecture in sorted(PARAMETERS):
            key = case.file, architecture
            if key not in compiled:
                compiled[key] = compile_file(*key)
            print(row(cost_of(case, compiled[key][case.kernel])), flush=True)


if __name__ == "__main__":
    main()
