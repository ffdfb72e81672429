"""What each kernel costs in instructions and bytes an element, counted by running its machine code.

    python -m gradwire.bench.studies.gpu.sass_costs                       # every case, for sm_80 and sm_90
    python -m gradwire.bench.studies.gpu.sass_costs --only waterfill      # some of them
    python -m gradwire.bench.studies.gpu.sass_costs --source OTHER/csrc   # another checkout's kernels
    python -m gradwire.bench.studies.gpu.sass_costs --registers           # registers and CTAs, sm_100 too

The counts are exact for the case's input. The last columns are an estimate that no GPU has confirmed: the share of the
memory's bandwidth that is left if nothing but issuing instructions (and no latency) stood in its way.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.bench.studies.gpu.sass import Kernel, compile_file
from gradwire.bench.studies.gpu.sass_machine import LANES, PARAMETERS, SECTOR, SassCounts, SassMemory, launch
from gradwire.compressors.kernels import reference
from gradwire.compressors.kernels.cuda.load import ENTRY_POINTS, FOLDER

MEMORY_NBYTES = 8 << 20


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


class Arena:
    """SassMemory for one case, and what must be in it afterwards."""

    def __init__(self) -> None:
        self.memory = SassMemory(MEMORY_NBYTES)
        self.wanted: list[tuple[str, int, NDArray[np.uint8]]] = []

    def put(self, tensor: Tensor) -> np.int64:
        """Places a tensor and returns its address."""
        return np.int64(self.memory.place(tensor.contiguous().view(-1).view(torch.uint8).numpy()))

    def expect(self, name: str, tensor: Tensor) -> np.int64:
        """Places zeros and returns their address; the kernel must write this tensor there."""
        address = self.put(torch.zeros_like(tensor))
        self.wanted.append((name, int(address), tensor.contiguous().view(-1).view(torch.uint8).numpy()))
        return address

    def check(self) -> None:
        """Raises ValueError if a result has other bits than the reference's."""
        for name, address, wanted in self.wanted:
            wrong = int((self.memory.taken(address, wanted.size) != wanted).sum())
            if wrong:
                raise ValueError(f"`{name}`: {wrong} of {wanted.size} bytes differ from the reference's")


@dataclass(frozen=True, slots=True)
class SassCase:
    """A kernel and what it works on."""

    name: str
    file: str
    kernel: str
    numel: int
    blocks: int
    threads: int
    arguments: Callable[[Arena], Sequence[np.generic]]


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


def _randn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _payloads(workers: int, nbytes: int, encode: Callable[[Tensor, Tensor], None], numel: int) -> Tensor:
    rows = torch.empty(workers, -(-nbytes // 16) * 16, dtype=torch.uint8)
    for worker in range(workers):
        encode(_randn(numel, 10 + worker), rows[worker, :nbytes])
    return rows


def waterfill_cases(bits: int = 5, numel: int = 16384) -> Iterator[SassCase]:
    """A group a CTA."""
    nbytes, groups = reference.waterfill_nbytes(numel, bits), numel // reference.WATERFILL_GROUP

    def rows(workers: int) -> Tensor:
        return _payloads(workers, nbytes, lambda x, to: reference.waterfill_encode(bits, x, None, None, to), numel)

    def encode(arena: Arena) -> Sequence[np.generic]:
        x, residual, left, payload = (
            _randn(numel, 0),
            _randn(numel, 1),
            torch.empty(numel),
            torch.empty(nbytes, dtype=torch.uint8),
        )
        reference.waterfill_encode(bits, x, residual, left, payload)
        where = arena.put(x), arena.put(residual), arena.expect("new_residual", left), arena.expect("payload", payload)
        return np.int32(bits), *where, np.int64(nbytes), np.int64(numel), np.int64(numel)

    def decode(workers: int) -> Callable[[Arena], Sequence[np.generic]]:
        def make(arena: Arena) -> Sequence[np.generic]:
            payloads, target = rows(workers), torch.empty(numel)
            reference.waterfill_decode_reduce(bits, payloads[:, :nbytes], None, target)
            where = arena.put(payloads), np.int64(payloads.stride(0)), np.int64(workers), np.int64(0)
            return np.int32(bits), *where, arena.expect("target", target), np.int64(numel)

        return make

    def reduce_encode(arena: Arena) -> Sequence[np.generic]:
        payloads, residual, left = rows(4), _randn(numel, 1), torch.empty(numel)
        reduced = torch.empty(nbytes, dtype=torch.uint8)
        reference.waterfill_reduce_encode(bits, payloads[:, :nbytes], residual, left, reduced, numel)
        where = arena.put(payloads), np.int64(payloads.stride(0)), np.int64(4), arena.put(residual)
        outputs = arena.expect("new_residual", left), arena.expect("reduced", reduced)
        return np.int32(bits), *where, *outputs, np.int64(numel)

    yield SassCase("waterfill encode", "waterfill", "waterfill_encode", numel, groups, 512, encode)
    for workers in (1, 4, 16):
        name = f"waterfill decode_reduce, W = {workers}"
        yield SassCase(name, "waterfill", "waterfill_decode_reduce", numel, groups, 512, decode(workers))
    yield SassCase(
        "waterfill reduce_encode, W = 4", "waterfill", "waterfill_reduce_encode", numel, groups, 512, reduce_encode
    )


def quantize_cases(bits: int, numel: int = 16384) -> Iterator[SassCase]:
    """A block a warp, as a launch of many CTAs has it."""
    nbytes = reference.quantize_nbytes(numel, bits)
    rounding = np.int32(0), np.uint32(0)

    def encode(arena: Arena) -> Sequence[np.generic]:
        x, residual, left, payload = (
            _randn(numel, 0),
            _randn(numel, 1),
            torch.empty(numel),
            torch.empty(nbytes, dtype=torch.uint8),
        )
        reference.quantize_encode(bits, x, residual, left, payload, None)
        where = arena.put(x), arena.put(residual), arena.expect("new_residual", left), arena.expect("payload", payload)
        return *where, np.int64(nbytes), np.int64(numel), np.int64(numel), np.int64(numel // 512), *rounding

    def rows(workers: int) -> Tensor:
        return _payloads(workers, nbytes, lambda x, to: reference.quantize_encode(bits, x, None, None, to, None), numel)

    def decode(workers: int) -> Callable[[Arena], Sequence[np.generic]]:
        def make(arena: Arena) -> Sequence[np.generic]:
            payloads, target = rows(workers), torch.empty(numel)
            reference.quantize_decode_reduce(bits, payloads[:, :nbytes], None, target)
            where = arena.put(payloads), np.int64(payloads.stride(0)), np.int64(workers), np.int64(0)
            return *where, arena.expect("target", target), np.int64(numel)

        return make

    def reduce_encode(arena: Arena) -> Sequence[np.generic]:
        payloads, residual, left = rows(4), _randn(numel, 1), torch.empty(numel)
        reduced = torch.empty(nbytes, dtype=torch.uint8)
        reference.quantize_reduce_encode(bits, payloads[:, :nbytes], residual, left, reduced, numel, None)
        where = arena.put(payloads), np.int64(payloads.stride(0)), np.int64(4), arena.put(residual)
        return *where, arena.expect("new_residual", left), arena.expect("reduced", reduced), np.int64(numel), *rounding

    name = f"quantize {bits} bits"
    yield SassCase(f"{name} encode", "quantize", f"quantize_encode_{bits}", numel, 4, 256, encode)
    for workers in (4, 8, 16):
        kernel = f"quantize_decode_reduce_{bits}"
        yield SassCase(f"{name} decode_reduce, W = {workers}", "quantize", kernel, numel, 8, 256, decode(workers))
    kernel = f"quantize_reduce_encode_{bits}"
    yield SassCase(f"{name} reduce_encode, W = 4", "quantize", kernel, numel, 4, 256, reduce_encode)


def onebit_cases(numel: int = 16384) -> Iterator[SassCase]:
    """A block a warp."""
    nbytes = reference.onebit_nbytes(numel)

    def encode(arena: Arena) -> Sequence[np.generic]:
        x, residual, left, payload = (
            _randn(numel, 0),
            _randn(numel, 1),
            torch.empty(numel),
            torch.empty(nbytes, dtype=torch.uint8),
        )
        reference.onebit_encode(x, residual, left, payload)
        where = arena.put(x), arena.put(residual), arena.expect("new_residual", left), arena.expect("payload", payload)
        return *where, np.int64(nbytes), np.int64(numel), np.int64(numel), np.int64(numel // 1024)

    def rows(workers: int) -> Tensor:
        return _payloads(workers, nbytes, lambda x, to: reference.onebit_encode(x, None, None, to), numel)

    def decode(workers: int) -> Callable[[Arena], Sequence[np.generic]]:
        def make(arena: Arena) -> Sequence[np.generic]:
            payloads, target = rows(workers), torch.empty(numel)
            reference.onebit_decode_reduce(payloads[:, :nbytes], None, target)
            where = arena.put(payloads), np.int64(payloads.stride(0)), np.int64(workers), np.int64(0)
            return *where, arena.expect("target", target), np.int64(numel)

        return make

    yield SassCase("onebit encode", "onebit", "onebit_encode", numel, 2, 256, encode)
    for workers in (4, 8, 16):
        name = f"onebit decode_reduce, W = {workers}"
        yield SassCase(name, "onebit", "onebit_decode_reduce", numel, 2, 256, decode(workers))


def all_cases() -> Iterator[SassCase]:
    """Every case, in the order of the table."""
    yield from waterfill_cases()
    yield from quantize_cases(8)
    yield from quantize_cases(4)
    yield from onebit_cases()


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


def registers_table(source: Path) -> Iterator[str]:
    """Registers, shared memory and size of every kernel of the files that have cases."""
    threads = {case.kernel: case.threads for case in all_cases()}
    yield "| kernel | sm | registers | shared, bytes | resident CTAs | instructions of the text |"
    yield "|---|---|---|---|---|---|"
    for file in ENTRY_POINTS:
        for architecture in SHARED_NBYTES:
            for name, kernel in compile_file(file, architecture, source).items():
                held = resident_ctas(kernel, threads.get(name, 256))
                size = len(kernel.instructions)
                yield f"| {name} | {architecture} | {kernel.registers} | {kernel.shared_nbytes} | {held} | {size} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the cases' names")
    parser.add_argument("--source", type=Path, default=FOLDER, help="the folder csrc to compile")
    parser.add_argument("--architectures", type=int, nargs="+", default=sorted(PARAMETERS))
    parser.add_argument("--registers", action="store_true", help="registers and resident CTAs, nothing is run")
    given = parser.parse_args()
    if given.registers:
        for line in registers_table(given.source):
            print(line, flush=True)
        return
    compiled: dict[tuple[str, int], dict[str, Kernel]] = {}
    print(heading(), flush=True)
    for case in all_cases():
        if given.only not in case.name:
            continue
        for architecture in given.architectures:
            key = case.file, architecture
            if key not in compiled:
                compiled[key] = compile_file(*key, given.source)
            print(row(cost_of(case, compiled[key][case.kernel])), flush=True)


if __name__ == "__main__":
    main()
